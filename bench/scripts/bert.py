"""A small encoder on sentences of different lengths, padded by the loader, with a mask."""

import torch
import torch.nn.functional as F
from stopwatch import tick
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset


class Sentences(Dataset):
    def __init__(self, count=1600):
        g = torch.Generator().manual_seed(0)
        lengths = torch.randint(8, 48, (count,), generator=g).tolist()
        self.rows = [torch.randint(1, 3000, (n,), generator=g) for n in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], int(self.rows[i][0]) % 2


def collate(batch):
    ids = pad_sequence([row for row, _ in batch], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor([y for _, y in batch])}


class Classifier(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.words, self.places = nn.Embedding(3000, width, padding_idx=0), nn.Embedding(64, width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 512), nn.Linear(512, width)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        batch, length = input_ids.shape
        h = self.words(input_ids) + self.places(torch.arange(length))[None]
        mask = attention_mask[:, None, None, :].bool()
        for _ in range(2):
            q, k, v = (f(h).view(batch, length, 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            h = self.norm1(h + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, -1))))
            h = self.norm2(h + self.drop(self.down(F.gelu(self.up(h)))))
        logits = self.head(h[:, 0])
        return F.cross_entropy(logits, labels), logits


torch.manual_seed(0)
loader = DataLoader(Sentences(), batch_size=16, shuffle=True, collate_fn=collate)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)

while True:
    for batch in loader:
        tick()
        loss, _ = model(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
