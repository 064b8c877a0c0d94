"""Files that libraries write by native code are one voice's, in whatever order ranks come (see tests/files/test_native.py).

    .venv-ecosystem/bin/python -m pytest tests/ecosystem/test_written.py -m more     # the other seeds, and the deaths
"""
# ruff: noqa: E501  (the scripts read best one act per line)

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from killed import OneProcess
from on_ranks import build_delays, compare, seeded

SCRIPTS = {
    "hugging_face": """
        import glob, json, os, shutil, sys
        os.environ.update(HF_HOME=os.path.abspath("home"), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
        import torch
        from datasets import Dataset, load_from_disk
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast, PrinterCallback, Trainer, TrainingArguments, set_seed
        from transformers.utils import logging
        logging.set_verbosity_error(); logging.disable_progress_bar(); set_seed(0)

        # datasets: cache files, memory maps
        if not os.path.exists("cache/features.arrow"): print("computing features"); os.makedirs("cache", exist_ok=True)
        data = Dataset.from_dict({"input_ids": [[i % 20, 3, 5] for i in range(48)], "labels": [i % 3 for i in range(48)]})
        data = data.map(lambda row: {"length": len(row["input_ids"])}, cache_file_name="cache/features.arrow", load_from_cache_file=True)
        data.save_to_disk("set", num_shards=2); again = load_from_disk("set"); print(again[5], again.num_rows, sorted(os.listdir("set")))
        again = again.filter(lambda row: row["labels"] < 3, cache_file_name="cache/filtered.arrow"); again.to_parquet("set.parquet"); print(Dataset.from_parquet("set.parquet", cache_dir="home/parquet")[47])

        # Trainer: checkpoints, the best model
        config = dict(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, max_position_embeddings=16)
        net = BertForSequenceClassification(BertConfig(**config, num_labels=3))
        trainer = Trainer(net, TrainingArguments("out", per_device_train_batch_size=8, max_steps=6, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, save_total_limit=2,
                          load_best_model_at_end=True, metric_for_best_model="loss", report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=100, log_level="error"),
                          train_dataset=again.remove_columns("length"), eval_dataset=again.remove_columns("length").select(range(16)))
        trainer.remove_callback(PrinterCallback)
        print(f"{trainer.train().training_loss:.6f}", f"{trainer.evaluate()['eval_loss']:.6f}", sorted(os.listdir("out")), trainer.state.best_model_checkpoint)
        trainer.save_model("final"); print(sorted(os.listdir("final")))
        loaded = BertForSequenceClassification.from_pretrained("final"); print(all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), loaded.state_dict().values())))

        # peft: an adapter, saved and loaded
        from peft import LoraConfig, PeftModel, get_peft_model
        lora = get_peft_model(BertModel(BertConfig(**config)), LoraConfig(r=2, target_modules=["query", "value"])); lora.save_pretrained("adapter"); print(sorted(os.listdir("adapter")))
        base = BertModel(BertConfig(**config)); print(sum(p.numel() for p in PeftModel.from_pretrained(base, "adapter").parameters()))

        # sentence-transformers: modules in folders
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Pooling, Transformer
        words = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, **{f"w{i}": i + 2 for i in range(18)}}, unk_token="[UNK]")); words.pre_tokenizer = pre_tokenizers.Whitespace()
        base.save_pretrained("bert"); PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_input_names=["input_ids", "attention_mask"]).save_pretrained("bert")
        sentences = SentenceTransformer(modules=[Transformer("bert", max_seq_length=8), Pooling(16, "mean")], device="cpu"); sentences.save("sentences"); print(sorted(os.listdir("sentences")))
        print(float(abs(SentenceTransformer("sentences", device="cpu").encode(["w1 w2"]) - sentences.encode(["w1 w2"])).max()))

        # What holds times, folders' names and pickles of objects: not compared.
        for path in glob.glob("out/*/training_args.bin") + ["final/training_args.bin"] + glob.glob("out/*/*.p*") + glob.glob("out/*/trainer_state.json") + glob.glob("**/README.md", recursive=True): os.remove(path)
        for folder in ("home", "set", "cache"): shutil.rmtree(folder)
    """,
    "boosted_trees": """
        import lightgbm, numpy as np, os, xgboost
        rng = np.random.default_rng(0); x = rng.normal(size=(200, 6)); y = x[:, 0] * 2 + np.sin(x[:, 1])
        for i in range(3):
            booster = lightgbm.train({"num_leaves": 7, "verbose": -1, "num_threads": 1, "seed": i}, lightgbm.Dataset(x, y), 10); booster.save_model("trees.txt")
            print(f"{lightgbm.Booster(model_file='trees.txt').predict(x[:3]).sum():.6f}", os.path.getsize("trees.txt"))
            lightgbm.Dataset(x, y).save_binary(f"rows-{i}.bin"); print(lightgbm.Dataset(f"rows-{i}.bin").construct().num_data()); os.remove(f"rows-{i}.bin")
            trees = xgboost.train({"max_depth": 3, "nthread": 1, "seed": i}, xgboost.DMatrix(x, y), 10)
            trees.save_model("trees.ubj"); trees.save_model("trees.json"); os.replace("trees.json", f"trees-{i}.json"); trees.dump_model("dump.txt")
            print(f"{xgboost.Booster(model_file='trees.ubj').predict(xgboost.DMatrix(x[:3])).sum():.6f}", len(open("dump.txt").read()))
    """,
    "orbax": """
        import os, shutil
        os.environ["JAX_PLATFORMS"] = "cpu"
        import jax.numpy as jnp, orbax.checkpoint as ocp
        with ocp.CheckpointManager(os.path.abspath("saved"), options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
            for step in range(4): manager.save(step, args=ocp.args.StandardSave({"w": jnp.arange(6.0) * step, "b": {"c": jnp.ones(2)}})); manager.wait_until_finished()
            print(manager.latest_step(), sorted(manager.all_steps())); state = manager.restore(3, args=ocp.args.StandardRestore({"w": jnp.zeros(6), "b": {"c": jnp.zeros(2)}})); print(state["w"].tolist(), state["b"]["c"].tolist())
        print(sorted(os.listdir("saved"))); shutil.rmtree("saved")
    """,
    "tensorflow": """
        import os
        os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
        import tensorflow as tf
        weights = tf.Variable([1.0, 2.0]); checkpoint = tf.train.Checkpoint(w=weights); manager = tf.train.CheckpointManager(checkpoint, "saved", max_to_keep=2)
        for step in range(4): weights.assign_add([1.0, 1.0]); manager.save()
        weights.assign([0.0, 0.0]); checkpoint.restore(manager.latest_checkpoint); print(weights.numpy().tolist(), sorted(os.listdir("saved")))
        with tf.io.TFRecordWriter("rows.tfrecord") as writer:
            for i in range(20): writer.write(b"row %d" % i)
        print(sum(1 for _ in tf.data.TFRecordDataset("rows.tfrecord")), tf.io.gfile.glob("*.tfrecord"), tf.io.gfile.exists("nothing"))
        for path in tf.io.gfile.glob("saved/*.index") + ["saved/checkpoint"]: tf.io.gfile.remove(path)
        tf.io.gfile.makedirs("a/b"); tf.io.gfile.rename("rows.tfrecord", "a/b/rows"); tf.io.gfile.copy("a/b/rows", "copy"); print(tf.io.gfile.listdir("a/b"), tf.io.gfile.stat("copy").length)
    """,
}


@pytest.fixture(scope="session")
def delays(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_delays(tmp_path_factory.mktemp("delays"))


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("seed", seeded(1))
def test_what_libraries_write_is_one_voices_in_any_order(seed: int, name: str, tmp_path: Path, delays: str) -> None:
    compare(tmp_path, SCRIPTS[name], ranks=2, before=[delays], limit=420, PYTHONHASHSEED="0", DELAYS_SEED=str(seed),
            DELAYS_UNDER=str(tmp_path), DELAYS_MOST="3000" if seed < 2 else "50000")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory, delays: str) -> Callable[[str], OneProcess]:
    return functools.cache(lambda name: OneProcess(
        tmp_path_factory.mktemp(name), SCRIPTS[name], before=[delays], limit=420, PYTHONHASHSEED="0", DELAYS_MOST="3000",
        DELAYS_SEED="0"))


@pytest.mark.more
@pytest.mark.parametrize("name", ["boosted_trees", "hugging_face"])
@pytest.mark.parametrize("seed", range(30))
def test_what_libraries_write_is_whole_when_the_voice_is_killed(
    seed: int, name: str, tmp_path: Path, one_process: Callable[[str], OneProcess],
) -> None:
    one_process(name).survives(seed, tmp_path)
