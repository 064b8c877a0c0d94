"""Much at once: a teacher, an average, a scaler, a closure, odd reads, own classes, its own checkpoint, two loaders."""

import copy
import dataclasses
import math
import os
import random

import end
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset


@dataclasses.dataclass
class Out:
    logits: torch.Tensor
    hidden: torch.Tensor


class Data(Dataset):
    def __init__(self, n):
        self.x = np.random.RandomState(0).randn(n, 6).astype("float32")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i][::-1].copy() if random.random() < 0.5 else self.x[i]
        return {"x": torch.from_numpy(x) + torch.rand(6) * np.float32(np.random.rand()),
                "y": int(x[0] > 0) + int(x[1] > 0),
                "name": f"n{i}"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b, self.calls = nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 3), 0

    def forward(self, x):
        self.calls += 1
        hidden = torch.relu(self.a(x))
        return Out(self.b(self.drop(hidden)), hidden)


class Meter:
    def __init__(self):
        self.sum, self.seen, self.table = torch.zeros(()), [], torch.zeros(3, 3)

    def add(self, loss, y, predicted):
        self.sum += loss.detach()
        self.seen = [*self.seen[-4:], (loss.detach(), predicted[0])]
        for a, b in zip(y, predicted, strict=True):
            self.table[a.item(), b] += 1


class Trainer:
    def __init__(self):
        torch.manual_seed(3)
        self.net, self.step, self.meter = Net(), 0, Meter()
        self.teacher, self.average = copy.deepcopy(self.net).eval(), AveragedModel(self.net)
        self.optimizer = torch.optim.NAdam(self.net.parameters(), 1e-2)
        self.line = nn.Linear(6, 1)
        self.other = torch.optim.LBFGS(self.line.parameters(), max_iter=3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
        self.schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        self.train = DataLoader(Data(160), 16, shuffle=True)
        self.test = DataLoader(Data(64), 16, shuffle=True, num_workers=1, generator=torch.Generator().manual_seed(4))
        self.first = 0
        if os.path.exists("last.pt"):  # a resumed run must not see what its first part has left
            self.first = torch.load("last.pt")["epoch"] + 1

    def fit(self):
        print("from", self.first)
        for epoch in range(self.first, 4):
            self.net.train()
            for batch in self.train:
                self.one(batch["x"], batch["y"])
            accuracy = self.evaluate()
            self.schedule.step(accuracy)
            torch.save({"epoch": epoch, "net": self.net.state_dict()}, "new.pt")
            os.replace("new.pt", "last.pt")
            print(epoch, batch["name"][0], self.meter.sum.item(), self.meter.table.tolist(), accuracy, self.net.calls,
                  sum(a for a, _ in self.meter.seen).item(), self.scaler.get_scale(), self.sums(), random.random())

    def one(self, x, y):
        out = self.net(x)
        noisy = self.net(x + 0.1 * torch.randn_like(x))
        with torch.no_grad():
            wanted = self.teacher(x).logits
        chance = out.logits.softmax(1)
        sure = chance.max(1).values > 0.4
        loss = F.cross_entropy(out.logits, y) + F.mse_loss(noisy.logits, wanted) + 0.01 * out.hidden.abs().mean()
        if sure.any():
            loss = loss + F.cross_entropy(out.logits[sure], y[sure])
        if not math.isfinite(loss):
            raise SystemExit(1)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_value_(self.net.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()

        def closure():
            self.other.zero_grad()
            miss = F.mse_loss(self.line(x), y[:, None].float())
            miss.backward()
            return miss

        self.other.step(closure)
        self.average.update_parameters(self.net)
        with torch.no_grad():
            for a, b in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                a.mul_(0.9).add_(b, alpha=0.1)
        self.meter.add(loss, y, out.logits.argmax(1).tolist())
        torch.multinomial(chance[0].detach(), 1).item()
        self.step += 1
        end.at(self.step)

    @torch.no_grad()
    def evaluate(self):
        self.net.eval()
        found, wanted = [], []
        for batch in self.test:
            found.append(self.net(batch["x"]).logits.numpy().argmax(1))
            wanted += batch["y"].tolist()
        return float((np.concatenate(found) == np.array(wanted)).mean())

    def sums(self):
        models = self.net, self.teacher, self.average, self.line
        return [sum(p.double().sum() for p in m.parameters()).item() for m in models]


if __name__ == "__main__":
    random.seed(5)
    np.random.seed(6)
    trainer = Trainer()
    trainer.fit()
    print("done", trainer.sums(), torch.rand(1).item())
