"""transformers' Trainer: padded batches, accumulation, clipping, evaluation, checkpoints, the best model; --bf16."""

import sys

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)
from words import make_texts, make_tokenizer

set_seed(0)
tokenizer = make_tokenizer()
texts = make_texts(60)
dataset = Dataset.from_dict({"text": texts, "label": [len(text.split()) % 3 for text in texts]})
dataset = dataset.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns="text")
parts = dataset.train_test_split(0.25, seed=1)
model = BertForSequenceClassification(BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, num_labels=3))


def metrics(found):
    return {"accuracy": float((found.predictions.argmax(-1) == np.asarray(found.label_ids)).mean())}


trainer = Trainer(
    model,
    TrainingArguments(
        "out", num_train_epochs=2, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_grad_norm=0.5,
        bf16="--bf16" in sys.argv, use_cpu=True, eval_strategy="epoch", save_strategy="epoch", save_total_limit=1,
        load_best_model_at_end=True, metric_for_best_model="accuracy", logging_steps=2, report_to="none"),
    train_dataset=parts["train"], eval_dataset=parts["test"], data_collator=DataCollatorWithPadding(tokenizer),
    compute_metrics=metrics)
print(f"train loss {trainer.train().metrics['train_loss']:.5f}")
found = trainer.evaluate()
print(f"eval loss {found['eval_loss']:.5f} accuracy {found['eval_accuracy']:.4f}")
torch.save(model.state_dict(), "model.pt")
