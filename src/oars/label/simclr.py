"""Features that are learnt from the images themselves, without labels: a small network, by SimCLR.

Each image is seen twice: turned, mirrored, shifted, brighter or darker, with a part erased. The network learns to tell
which two views are of one image. What is the same in both is what classes of diffraction images differ in. Every step
draws from a random generator of its own, so a training that was interrupted goes on as if it had not been.
"""

from __future__ import annotations

import math
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oars.label.pixels import grey, pooled, root

SIDES = (32, 64, 128)  # of the squares that the network sees
STEPS = 155  # five times over 4,000 images
BATCH = 128
MOST = 4000  # images that it learns from; more teach little and cost memory
_TEMPERATURE, _RATE, _DECAY = 0.2, 4e-3, 1e-4
_KEEP = 10  # steps between two states on disk
_PIECE = 200


def square(image: np.ndarray, side: int) -> np.ndarray:
    """Roots of counts in a square: means of blocks, or pixels repeated; the margin has the image's mean."""
    small = pooled(root(grey(image)), side, "mean")
    times = max(1, side // max(small.shape))
    small = small.repeat(times, 0).repeat(times, 1)
    out = np.full((side, side), small.mean(), np.float16)
    top, left = ((side - length) // 2 for length in small.shape)
    out[top:top + small.shape[0], left:left + small.shape[1]] = np.minimum(small, 60_000)
    return out


class Net(nn.Module):
    """The mean and the maximum of each map: rings are seen by the one, spots by the other."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 96)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for at, width in enumerate(widths):
            layers += [nn.MaxPool2d(2)] if at else []
            layers += [nn.Conv2d(before, width, 3, 1 if at else 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        self.maps = nn.Sequential(*layers)
        self.width = 2 * before

    def forward(self, x: Tensor) -> Tensor:
        maps = self.maps(x)
        return torch.cat([maps.mean((2, 3)), maps.amax((2, 3))], 1)


def view(x: Tensor, chance: torch.Generator) -> Tensor:
    """Every image as it could have been as well."""
    count, side = len(x), x.shape[-1]
    angle = 2 * math.pi * torch.rand(count, generator=chance)
    mirror = (torch.rand(count, generator=chance) < 0.5).float() * 2 - 1
    way = torch.zeros(count, 2, 3)
    way[:, 0, 0], way[:, 0, 1] = angle.cos() * mirror, -angle.sin()
    way[:, 1, 0], way[:, 1, 1] = angle.sin() * mirror, angle.cos()
    way[:, :, 2] = (torch.rand(count, 2, generator=chance) - 0.5) / 10
    seen = F.grid_sample(x, F.affine_grid(way, list(x.shape), align_corners=False), padding_mode="border",
                         align_corners=False)
    gain, offset = torch.randn(2, count, 1, 1, 1, generator=chance)
    seen = seen * (1 + 0.2 * gain) + 0.1 * offset
    hole = side // 4
    begin = torch.randint(0, side - hole, (2, count, 1), generator=chance)
    inside = (torch.arange(side) >= begin) & (torch.arange(side) < begin + hole)
    erased = inside[0][:, :, None] & inside[1][:, None, :]
    erased[1::2] = False  # half of them stay whole
    return seen.masked_fill(erased[:, None], 0)


class Learned:
    """A network, and how its images are scaled; untrained (``conv``) it is features too, of chance."""

    def __init__(self, seed: int, images: np.ndarray | None = None) -> None:
        torch.manual_seed(seed)
        self.net, self.step = Net(), 0
        self._seed = seed
        self._project = nn.Sequential(nn.Linear(self.net.width, 256), nn.BatchNorm1d(256), nn.ReLU(),
                                      nn.Linear(256, 128))
        weights = [*self.net.parameters(), *self._project.parameters()]
        self._optimizer = torch.optim.AdamW(weights, lr=_RATE, weight_decay=_DECAY)
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, _RATE, total_steps=STEPS)
        self.side = 0 if images is None else images.shape[-1]
        self.mean, self.spread = (0.0, 1.0) if images is None else (
            float(images.mean(dtype=np.float64)), float(images.std(dtype=np.float64)) + 1e-6)

    def scaled(self, images: np.ndarray) -> Tensor:
        """Squares as the network takes them."""
        return (torch.from_numpy(images.astype(np.float32))[:, None] - self.mean) / self.spread

    def learn(self, images: np.ndarray, path: Path, done: Callable[[int], None]) -> None:
        """All steps that are missing; the state is kept at ``path`` as it goes."""
        size = min(BATCH, len(images))
        each = len(images) // size  # batches of an epoch
        self.net.train()
        while self.step < STEPS:
            epoch, at = divmod(self.step, each)
            order = torch.randperm(len(images), generator=torch.Generator().manual_seed(self._seed + 7919 * epoch))
            x = self.scaled(images[order[at * size:(at + 1) * size].numpy()])
            chance = torch.Generator().manual_seed(self._seed + 104_729 * (self.step + 1))
            loss = self._loss(torch.cat([view(x, chance), view(x, chance)]))
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
            if self.step + 1 < STEPS:
                self._schedule.step()
            self.step += 1
            if self.step % _KEEP == 0 or self.step == STEPS:
                self.keep(path)
            done(self.step)

    def _loss(self, views: Tensor) -> Tensor:
        found = F.normalize(self._project(self.net(views)), dim=1)
        alike = (found @ found.T / _TEMPERATURE).fill_diagonal_(-1e9)
        return F.cross_entropy(alike, torch.arange(len(views)).roll(len(views) // 2))

    @torch.no_grad()
    def features(self, images: np.ndarray) -> np.ndarray:
        """A row for each square."""
        self.net.eval()
        return torch.cat([self.net(self.scaled(images[at:at + _PIECE])) for at in range(0, len(images), _PIECE)]
                         ).numpy()

    # ---- on disk -----------------------------------------------------------------------------------------------------

    def keep(self, path: Path) -> None:
        """Everything that the next step depends on: complete, or as it was."""
        state: dict[str, Any] = {"step": self.step, "side": self.side, "mean": self.mean, "spread": self.spread}
        part = path.with_name(path.name + ".part")
        torch.save({**state, **{name: one.state_dict() for name, one in self._parts().items()}}, part)
        os.replace(part, path)

    def again(self, path: Path) -> bool:
        """Go on where an earlier one stopped. If it is False, begin with a new object. Code in a file is refused."""
        try:
            state = torch.load(path, weights_only=True)
            for name, one in self._parts().items():
                one.load_state_dict(state[name])
            self.step, self.side = int(state["step"]), int(state["side"])
            self.mean, self.spread = float(state["mean"]), float(state["spread"])
        except FileNotFoundError:
            return False
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile,
                pickle.UnpicklingError):  # half of a file, of a full disk
            path.unlink(missing_ok=True)
            return False
        return True

    def _parts(self) -> dict[str, Any]:
        return {"net": self.net, "project": self._project, "optimizer": self._optimizer, "schedule": self._schedule}
