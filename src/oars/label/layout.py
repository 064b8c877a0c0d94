"""The map: alike images lie together in a plane.

Neighbours attract, random pairs repel (as in t-SNE and UMAP, on 15 neighbours). Up to 20,000 landmarks are laid out;
every other row is put in the middle of its five nearest landmarks. So far distances on the map mean little, and a small
group that lies in none of the landmarks is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

LANDMARKS, NEIGHBOURS, ROUNDS, APART = 20_000, 15, 150, 5
_PIECE = 2000


def layout(features: np.ndarray, seed: int, progress: Callable[[int, int], None]) -> np.ndarray:
    """Two coordinates from -1 to 1 for each row."""
    import torch

    x = torch.from_numpy(features)
    x = x / x.norm(dim=1, keepdim=True).clamp(min=1e-6)
    rows = len(x)
    chance = torch.Generator().manual_seed(seed)
    marks = torch.randperm(rows, generator=chance)[:LANDMARKS]
    landmarks = x[marks]
    count = min(NEIGHBOURS, len(landmarks) - 1)
    if count < 1:
        return np.zeros((rows, 2), np.float32)
    near = _nearest(landmarks, landmarks, count + 1)[:, 1:]
    middle = landmarks - landmarks.mean(0)
    torch.manual_seed(seed)  # svd_lowrank takes no generator
    axes = torch.svd_lowrank(middle, min(2, *middle.shape), niter=2)[2]
    place = torch.zeros(len(landmarks), 2)
    place[:, :axes.shape[1]] = middle @ axes
    place = place / place.std().clamp(min=1e-6) + 0.01 * torch.randn(len(landmarks), 2, generator=chance)
    one, other = torch.arange(len(landmarks)).repeat_interleave(count), near.reshape(-1)
    for number in range(ROUNDS):
        way = place[one] - place[other]
        pull = (-2 * way / (1 + (way * way).sum(1, keepdim=True))).clamp(-4, 4) / count
        move = torch.zeros_like(place)
        move.index_add_(0, one, pull)
        move.index_add_(0, other, -pull)
        for _ in range(APART):
            way = place - place[torch.randint(0, len(place), (len(place),), generator=chance)]
            square = (way * way).sum(1, keepdim=True)
            move += (2 * way / ((0.01 + square) * (1 + square))).clamp(-4, 4) / APART
        place = place + (1 - number / ROUNDS) * move.clamp(-4, 4)
        if number % 10 == 0:
            progress(number, ROUNDS)
    found = torch.empty(rows, 2)
    found[marks] = place
    rest = torch.ones(rows, dtype=torch.bool)
    rest[marks] = False
    others = rest.nonzero()[:, 0]
    if len(others):
        found[others] = place[_nearest(landmarks, x[others], min(5, len(landmarks)))].mean(1)
    low, high = found.min(0).values, found.max(0).values
    return ((found - (low + high) / 2) / ((high - low).max() / 2).clamp(min=1e-6)).numpy().astype("<f4")


def _nearest(among: Any, of: Any, count: int) -> Any:
    import torch

    return torch.cat([(of[at:at + _PIECE] @ among.T).topk(count).indices for at in range(0, len(of), _PIECE)])
