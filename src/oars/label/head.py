"""What learns from labels: a few small networks on features, together; and clusters, for when there are no labels.

Seeds are fixed: the same labels on the same features give the same model, whatever was labelled first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NETS, HIDDEN, STEPS = 5, 64, 150
_PIECE = 16384
_BATCH = 4096  # more labels than this are learnt from in parts


def scale(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean and the spread of every column."""
    return features.mean(0, dtype=np.float64), features.std(0, dtype=np.float64) + 1e-6


def standard(features: np.ndarray, by: tuple[np.ndarray, np.ndarray] | None = None) -> np.ndarray:
    """Every column with mean 0 and spread 1, or in the ``scale`` of other rows; far outliers are brought nearer."""
    mean, spread = by or scale(features)
    return np.ascontiguousarray(((features - mean) / spread).clip(-6, 6), np.float32)


class Head:
    """Networks of one hidden layer, each trained on most of the labels; their mean is the guess."""

    def __init__(self, features: np.ndarray, labels: np.ndarray, steps: int = STEPS) -> None:
        import torch
        import torch.nn.functional as F

        self.classes = np.unique(labels)
        target = torch.from_numpy(np.searchsorted(self.classes, labels))
        x = torch.from_numpy(np.ascontiguousarray(features, np.float32))
        (count, width), kinds = x.shape, len(self.classes)
        chance = torch.Generator().manual_seed(0)

        def weights(*shape: int) -> Any:
            return (torch.randn(*shape, generator=chance) * (2 / shape[-2]) ** 0.5).requires_grad_()

        self._w1, self._w2 = weights(NETS, width, HIDDEN), weights(NETS, HIDDEN, kinds)
        self._b1 = torch.zeros(NETS, 1, HIDDEN, requires_grad=True)
        self._b2 = torch.zeros(NETS, 1, kinds, requires_grad=True)
        optimizer = torch.optim.AdamW([self._w1, self._b1, self._w2, self._b2], lr=5e-3, weight_decay=0.4)
        learns = (torch.rand(NETS, count, generator=chance) < 0.8).float()
        for _ in range(steps):
            part = torch.randperm(count, generator=chance)[:_BATCH] if count > _BATCH else slice(None)
            some, truth, weight = x[part], target[part], learns[:, part]
            kept = (torch.rand(NETS, 1, width, generator=chance) < 0.8).float() / 0.8
            out = torch.relu((some[None] * kept) @ self._w1 + self._b1) @ self._w2 + self._b2
            loss = F.cross_entropy(out.reshape(-1, kinds), truth.repeat(NETS), reduction="none").view(NETS, -1)
            optimizer.zero_grad()
            ((loss * weight).sum() / weight.sum().clamp(min=1)).backward()
            optimizer.step()

    def chances(self, features: np.ndarray) -> np.ndarray:
        """The chance of each of ``classes`` for each row."""
        import torch

        out = np.empty((len(features), len(self.classes)), np.float32)
        with torch.no_grad():
            for at in range(0, len(features), _PIECE):
                x = torch.from_numpy(features[at:at + _PIECE])[None]
                found = (torch.relu(x @ self._w1 + self._b1) @ self._w2 + self._b2).softmax(-1).mean(0)
                out[at:at + _PIECE] = found.numpy()
        return out


def balanced(features: np.ndarray, labels: np.ndarray, folds: int = 4) -> float:
    """Cross-validated accuracy, every class counted alike however rare: what tells useful features from useless."""
    fold = np.empty(len(labels), np.int64)
    for label in np.unique(labels):  # every fold has its part of each class
        rows = np.flatnonzero(labels == label)
        fold[rows] = np.random.default_rng(len(rows)).permutation(len(rows)) % folds
    right = np.zeros(len(labels), bool)
    for number in range(folds):
        test = fold == number
        if not test.any() or len(np.unique(labels[~test])) < 2:
            continue
        head = Head(features[~test], labels[~test], 80)
        right[test] = head.classes[head.chances(features[test]).argmax(1)] == labels[test]
    return float(np.mean([right[labels == label].mean() for label in np.unique(labels)]))


def clusters(features: np.ndarray, count: int, seed: int, rounds: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """k-means: the cluster of each row, and its squared distance to that cluster's middle."""
    rng = np.random.default_rng(seed)
    some = features[rng.permutation(len(features))[:20_000]]
    middles = some[rng.choice(len(some), 1)]
    far = ((some - middles[0]) ** 2).sum(1)
    while len(middles) < min(count, len(some)):  # k-means++: far ones first
        if far.sum() <= 0:
            break
        middles = np.concatenate([middles, some[rng.choice(len(some), 1, p=far / far.sum())]])
        far = np.minimum(far, ((some - middles[-1]) ** 2).sum(1))
    for _ in range(rounds):
        of, _ = nearest(some, middles)
        sums = np.zeros_like(middles)
        np.add.at(sums, of, some)
        counts = np.bincount(of, minlength=len(middles))
        new = np.where(counts[:, None] > 0, sums / np.maximum(1, counts)[:, None], middles)
        if np.allclose(new, middles):
            break
        middles = new
    return nearest(features, middles)


def nearest(features: np.ndarray, middles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each row: which of the middles is nearest, and its squared distance."""
    of, far = np.empty(len(features), np.int64), np.empty(len(features), np.float32)
    norms = (middles ** 2).sum(1)
    for at in range(0, len(features), _PIECE):
        x = features[at:at + _PIECE]
        away = norms - 2 * (x @ middles.T) + (x ** 2).sum(1)[:, None]
        of[at:at + _PIECE] = away.argmin(1)
        far[at:at + _PIECE] = np.maximum(0, away.min(1))
    return of, far
