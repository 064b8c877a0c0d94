"""A small GPT that learns to spell, one letter at a time, from text that this script makes up.

Batches are cut from the text by hand, as in nanoGPT: there is no DataLoader.
"""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--steps", type=int, default=50, help="steps per epoch")
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--block", type=int, default=48, help="how many letters the model looks back on")
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
torch.manual_seed(args.seed)


def make_text(sentences, seed):
    """Sentences of a small grammar."""
    rng = random.Random(seed)
    who = ["the crew", "a sailor", "the old captain", "every rower", "the cook"]
    does = ["pulls", "mends", "carries", "counts", "forgets"]
    what = ["the oars", "a rope", "two anchors", "the long boat", "an empty barrel"]
    when = ["at dawn", "in the rain", "before the tide turns", "without a word", "again and again"]
    return " ".join(" ".join(rng.choice(part) for part in (who, does, what, when)) + "." for _ in range(sentences))


text = make_text(3000, args.seed)
letters = sorted(set(text))
data = torch.tensor([letters.index(c) for c in text])
split = int(0.9 * len(data))
train, held_out = data[:split], data[split:]


def get_batch(source):
    """Random stretches of the text, and the same stretches one letter on."""
    at = torch.randint(len(source) - args.block - 1, (args.batch_size,))
    x = torch.stack([source[i : i + args.block] for i in at])
    y = torch.stack([source[i + 1 : i + 1 + args.block] for i in at])
    return x, y


class Block(nn.Module):
    """Attention to the letters before, then a little network for each letter alone."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class CharLM(nn.Module):
    """Letters and places become vectors, two blocks mix them, a linear layer guesses the next letter."""

    def __init__(self, vocabulary, width, block):
        super().__init__()
        self.block = block
        self.letter, self.place = nn.Embedding(vocabulary, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, idx, targets=None):
        x = self.letter(idx) + self.place(torch.arange(idx.shape[1], device=idx.device))
        logits = self.head(self.norm(self.blocks(x)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))

    @torch.no_grad()
    def write(self, idx, count):
        """Go on from idx for count letters."""
        for _ in range(count):
            logits, _ = self(idx[:, -self.block :])
            idx = torch.cat([idx, torch.multinomial(F.softmax(logits[:, -1], dim=-1), 1)], dim=1)
        return idx


model = CharLM(len(letters), args.width, args.block)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

for epoch in range(args.epochs):
    for step in range(args.steps):
        logits, loss = model(*get_batch(train))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {epoch * args.steps + step} loss {loss.item():.6f}")

model.eval()
with torch.no_grad():
    x, y = get_batch(held_out)
    logits, loss = model(x, y)
    print(f"held-out loss {loss.item():.5f}")
    print(f"accuracy {100 * (logits.argmax(-1) == y).float().mean().item():.2f} %")
start = torch.tensor([[letters.index("t")]])
print("".join(letters[i] for i in model.write(start, 60)[0].tolist()))
