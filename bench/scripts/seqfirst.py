"""A language model: a transformer with the sequence first and the batch second, batches cut by hand."""

import math

import torch
import torch.nn.functional as F
from stopwatch import tick
from torch import nn

WORDS, BPTT, BATCH = 2000, 35, 20


class TransformerModel(nn.Module):
    def __init__(self, ninp=200, nhead=2, nhid=200, nlayers=2, dropout=0.2):
        super().__init__()
        pe = torch.zeros(500, 1, ninp)
        angle = torch.arange(500.0)[:, None] * torch.exp(torch.arange(0, ninp, 2) * -math.log(10000.0) / ninp)
        pe[:, 0, 0::2], pe[:, 0, 1::2] = angle.sin(), angle.cos()
        self.register_buffer("pe", pe)
        self.drop, self.ninp = nn.Dropout(dropout), ninp
        self.input_emb, self.decoder = nn.Embedding(WORDS, ninp), nn.Linear(ninp, WORDS)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(ninp, nhead, nhid, dropout), nlayers)

    def forward(self, src):
        mask = torch.log(torch.tril(torch.ones(len(src), len(src))))
        src = self.input_emb(src) * math.sqrt(self.ninp)
        src = self.drop(src + self.pe[:src.size(0)])
        return F.log_softmax(self.decoder(self.encoder(src, mask=mask)), dim=-1)


torch.manual_seed(1)
source = torch.randint(0, WORDS, (2100, BATCH))
model = TransformerModel()
criterion = nn.NLLLoss()

while True:
    for i in range(0, source.size(0) - 1, BPTT):
        tick()
        seq_len = min(BPTT, len(source) - 1 - i)
        data, targets = source[i:i + seq_len], source[i + 1:i + 1 + seq_len].view(-1)
        model.zero_grad()
        loss = criterion(model(data).view(-1, WORDS), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.5)
