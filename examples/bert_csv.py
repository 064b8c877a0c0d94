"""A small BERT: it learns a language by guessing hidden words, and is then fine-tuned to tell good reviews from bad.

The reviews are a CSV file with the columns text and label. Without ``--data`` it is written, by a small grammar.
"""

import argparse
import csv
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", type=Path, default=Path("reviews.csv"), help="a CSV file with the columns text and label")
parser.add_argument("--rows", type=int, default=2000, help="how many are written, if there are none")
parser.add_argument("--pretrain", type=int, default=4, help="epochs of guessing hidden words")
parser.add_argument("--epochs", type=int, default=6, help="epochs of fine-tuning")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, PAD, CLS, HIDDEN, UNKNOWN = 16, 0, 1, 2, 3


def write(path):
    """Reviews: what is not followed by its opposite decides."""
    rng = random.Random(args.seed)
    good, bad = ["fine", "great", "quick", "friendly", "warm"], ["slow", "cold", "rude", "noisy", "stale"]
    things = ["the soup", "the staff", "our room", "the crew", "the coffee", "this boat", "the view"]
    with open(path, "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for _ in range(args.rows):
            label = rng.random() < 0.5
            words = [rng.choice(["today", "again", "i think", "all in all", "well"]), rng.choice(things), "was"]
            opposite = rng.random() < 0.5  # "not slow" is praise
            words += ["not"] * opposite + [rng.choice(good if label != opposite else bad)]
            rows.writerow([" ".join(words + [rng.choice(["as ever", "to be honest", "for once", ""])]), int(label)])


def read(path):
    """The words' numbers, and the labels."""
    with open(path, newline="") as file:
        rows = [(row["text"].split(), int(row["label"])) for row in csv.DictReader(file)]
    known = {word: 4 + i for i, word in enumerate(sorted({word for text, _ in rows for word in text}))}
    ids = torch.full((len(rows), LENGTH), PAD)
    for row, (text, _) in enumerate(rows):
        numbers = [CLS, *(known.get(word, UNKNOWN) for word in text)][:LENGTH]
        ids[row, : len(numbers)] = torch.tensor(numbers)
    return ids, torch.tensor([label for _, label in rows]), 4 + len(known)


class Bert(nn.Module):
    """An encoder that looks both ways."""

    def __init__(self, words):
        super().__init__()
        self.words = nn.Embedding(words, args.width, padding_idx=PAD)
        self.places = nn.Parameter(torch.randn(LENGTH, args.width) * 0.02)
        w = args.width
        layer = nn.TransformerEncoderLayer(w, 4, 4 * w, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, args.layers, nn.LayerNorm(w), enable_nested_tensor=False)

    def forward(self, ids):
        return self.layers(self.words(ids) + self.places, src_key_padding_mask=ids == PAD)


if not args.data.exists():
    write(args.data)
ids, labels, words = read(args.data)
held_out = len(ids) // 5
train = DataLoader(TensorDataset(ids[held_out:], labels[held_out:]), args.batch_size, shuffle=True)
test = DataLoader(TensorDataset(ids[:held_out], labels[:held_out]), 4 * args.batch_size)
bert, guess, judge = Bert(words), nn.Linear(args.width, words), nn.Linear(args.width, 2)
for part in (bert, guess, judge):
    part.to(device)

optimizer = torch.optim.AdamW([*bert.parameters(), *guess.parameters()], lr=1e-3)
for epoch in range(args.pretrain):
    for batch, _ in train:
        batch = batch.to(device)
        hide = (torch.rand(batch.shape, device=device) < 0.15) & (batch > UNKNOWN)
        scores = guess(bert(batch.masked_fill(hide, HIDDEN)))
        loss = F.cross_entropy(scores.flatten(0, 1), batch.masked_fill(~hide, -100).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"hidden words: epoch {epoch} loss {loss.item():.4f}")

optimizer = torch.optim.AdamW([{"params": bert.parameters(), "lr": 1e-3}, {"params": judge.parameters(), "lr": 2e-3}])
for epoch in range(args.epochs):
    bert.train()
    for batch, label in train:
        loss = F.cross_entropy(judge(bert(batch.to(device))[:, 0]), label.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*bert.parameters(), *judge.parameters()], 1.0)
        optimizer.step()
    bert.eval()
    with torch.no_grad():
        right = sum((judge(bert(batch.to(device))[:, 0]).argmax(1) == label.to(device)).sum().item()
                    for batch, label in test)
    print(f"reviews: epoch {epoch} loss {loss.item():.4f} accuracy {right / held_out:.3f}")
