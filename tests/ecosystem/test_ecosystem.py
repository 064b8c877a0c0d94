"""Popular libraries, each played by a script like its own examples: one process against 2 ranks (some against 3).

Printed lines, files and weights are compared, and whether steps were split is asserted from the run's own record. The
last test writes what was found to ``docs/ecosystem.md``.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from compare import files_differ, lines_differ
from running import ROOT, Run
from safetensors.torch import load_file

HERE = Path(__file__).parent
TABLE = ROOT / "docs" / "ecosystem.md"
# What differs between any two runs of one process.
CLOCKED = re.compile(r"'?(eval|train)_(runtime|samples_per_second|steps_per_second)'?: *'?[\d.e+-]+'?,? ?")

# script: the packages that it is about, what of them, whether it is split, and why not (or what is not)
SCRIPTS = {
    "transformers_models": ("transformers", "BERT, GPT-2, Llama, T5; padded batches, sdpa and eager", True, ""),
    "transformers_trainer": ("transformers datasets", "Trainer, checkpoints, the best model", True, ""),
    "transformers_trainer --bf16": ("transformers datasets", "the same in bf16", True, ""),
    "accelerate_loop": ("accelerate datasets evaluate", "a loop, accumulation, metrics", True, ""),
    "peft_lora": ("peft transformers", "LoRA", True, ""),
    "trl_sft": ("trl", "SFTTrainer", True, "the loss over the vocabulary is computed whole"),
    "trl_dpo": ("trl", "DPOTrainer", True, "the loss over the vocabulary is computed whole"),
    "sentence_transformers_pairs": ("sentence-transformers", "in-batch negatives", True, ""),
    "lightning_fit": ("lightning", "Trainer, checkpoint, scheduler", True, ""),
    "ignite_engine": ("pytorch-ignite", "engines, metrics, checkpoint", True, ""),
    "skorch_net": ("skorch scikit-learn", "pipeline, grid search", True, ""),
    "torch_geometric_batches": ("torch_geometric", "graphs in mini-batches", False, "messages between nodes: "
                                "the rows of a batch of graphs are nodes, and edges name them by their places"),
    "torch_geometric_whole": ("torch_geometric", "one graph", False, "all nodes belong together"),
    "stable_baselines3_ppo": ("stable-baselines3 gymnasium", "PPO, A2C", True, "environments run on every rank"),
    "diffusers_unet": ("diffusers", "UNet, DDPM", True, ""),
    "keras_tuner_search": ("keras-tuner keras", "random search, Keras on PyTorch", True, ""),
    "flax_nnx_loop": ("flax optax jax", "NNX, a jitted step", False, "JAX without Keras is not split"),
    "xgboost_fit": ("xgboost-cpu", "classifier", False, "no framework that oars knows"),
    "lightgbm_fit": ("lightgbm", "regressor", False, "no framework that oars knows"),
}
ON_THREE = ("transformers_models", "lightning_fit", "sentence_transformers_pairs")
NUMBERS = [(script, n) for script in SCRIPTS for n in (2, 3) if n == 2 or script in ON_THREE]
# In bfloat16 the order of a sum shows in the third digit.
ROUGH = {"transformers_trainer --bf16"}
# Adam makes steps of the rounding errors of a parameter that has next to no gradient (the bias of keys).
OF_ADAM = 1e-4
found: dict[str, list[str]] = {}


@pytest.fixture(scope="session")
def one_process(tmp_path_factory):
    runs: dict[str, Run] = {}

    def begin(script: str) -> Run:
        if script not in runs:
            folder = tmp_path_factory.mktemp("ecosystem") / "one"
            runs[script] = Run(folder, *command(script), command=[sys.executable], limit=200, **OFFLINE)
        return runs[script]

    return begin


OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
           "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}


def command(script: str) -> list[str]:
    """A script and its arguments, from its name in the table."""
    name, *arguments = script.split()
    return [str(HERE / f"scripts/{name}.py"), *arguments]


def test_every_script_has_its_line():
    there = {path.stem for path in (HERE / "scripts").glob("*.py")} - {"words"}
    assert {words.split()[0] for words in SCRIPTS} == there


@pytest.mark.parametrize(("script", "n"), [pytest.param(s, n, id=f"{s.replace(' --', '-')}-{n}") for s, n in NUMBERS])
def test_ranks_do_what_one_process_does(script, n, one_process, tmp_path):
    one, (_, _, split, _) = one_process(script), SCRIPTS[script]
    assert one.code == 0, f"the script itself fails:\n{one}"
    many = Run(tmp_path / "ranks", "-n", n, *command(script), limit=200, OARS_DIGEST="1", **OFFLINE)
    told = []
    if many.code:
        told.append(f"exit code {many.code}")
    elif differ := lines_differ(steady(script, one.lines), steady(script, many.lines)):
        told.append(f"printed lines differ:\n{differ}")
    for folder in (one.cwd, many.cwd):
        as_tensors(folder)
    if not many.code and (differ := files_differ(one.cwd, many.cwd, OF_ADAM)) and script not in ROUGH:
        told.append(f"files differ:\n{differ}")
    if len(set(many.digests().values())) > 1:
        told.append(f"weights are not equal, to the bit, on {n} ranks: {many.digests()}")
    shares = (many.summary["split_steps"], many.summary["steps"]) if not many.code else (0, 0)
    right = not told
    if split and shares[0] < shares[1] or shares[1] and split != (shares[0] > 0):
        told.append(f"{shares[0]} of {shares[1]} steps were split")
    if "when samples are read: every rank reads whole batches" in many.err:
        told.append("a data set was taken for one that remembers")
    if not split and "split: every rank did all of the work" not in many.err:
        told.append("nobody was told that every rank did all of the work")
    if n == 2:
        found[script] = ["yes" if right else "no", f"{shares[0]} of {shares[1]} steps" if shares[1] else "no"]
    if told:
        pytest.fail(f"{script} on {n} ranks\n" + "\n".join(told) + f"\n{many}", pytrace=False)


def as_tensors(folder: Path) -> None:
    """Files that hold weights beside times and paths: the weights alone, so that they can be compared."""
    for path in [p for p in folder.rglob("*") if "oars-runs" not in p.parts and p.is_file()]:
        if path.suffix == ".ckpt":
            torch.save(torch.load(path, weights_only=False)["state_dict"], path.with_suffix(".ckpt.pt"))
        elif path.suffix == ".safetensors":
            torch.save(load_file(path), path.with_suffix(".safetensors.pt"))
        elif path.suffix == ".json" and path.name != "oracle.json":
            path.write_text(re.sub(r'.*(_runtime|_per_second|total_flos|timestamp|"id").*', "", path.read_text()))
            continue
        elif path.suffix == ".h5":  # times are in it
            with h5py.File(path) as file:
                np.savez(path.with_suffix(".npz"), **arrays_of(file))
        elif path.suffix not in (".bin", ".md") and path.name != "oracle.json":
            continue
        # Left: pickled arguments with their folders, cards with the date, trials that keras-tuner numbers by the clock.
        path.unlink()


def arrays_of(group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    group.visititems(lambda name, part: found.update({name: part[()]}) if isinstance(part, h5py.Dataset) else None)
    return found


def steady(script: str, lines: list[str]) -> list[str]:
    """Lines without times; where sums are rounded to three digits, with as many."""
    lines = [CLOCKED.sub("", line) for line in lines]
    if script in ROUGH:
        lines = [re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.2g}", line) for line in lines]
    return lines


def test_the_table_in_docs_is_what_was_found():
    """Written anew when all scripts were played."""
    if set(found) != set(SCRIPTS):
        return
    rows = []
    for script, (packages, what, _, why) in SCRIPTS.items():
        right, split = found[script]
        named = ", ".join(f"{package} {version(package)}" for package in packages.split())
        rows.append(f"| {named} | {what} | {right} | {split} | {why} |\n")
    text = TABLE.read_text()
    head, _, _ = text.partition("| libraries |")
    TABLE.write_text(head + "| libraries | what | right | split | what is not, and why |\n|---|---|---|---|---|\n"
                     + "".join(rows))
