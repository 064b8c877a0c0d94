"""Parts of a data set: every row in exactly one of them, the same for the same seed on any machine and any rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WAYS = ("random", "order", "stratified", "group")


def sizes(rows: int, shares: Sequence[float]) -> list[int]:
    """How many rows each share gets: rounded so that shares that make up 1 make up all rows."""
    if not shares or min(shares) < 0 or sum(shares) > 1 + 1e-9:
        raise ValueError(f"shares {', '.join(map(str, shares))} must be 0 or more and make up at most 1")
    ends = np.floor(np.cumsum(shares) * rows + 0.5 + 1e-9).astype(int).clip(max=rows)
    if abs(sum(shares) - 1) < 1e-9:
        ends[-1] = rows
    return np.diff(ends, prepend=0).tolist()


def cut(order: np.ndarray, shares: Sequence[float]) -> list[np.ndarray]:
    """``order`` in pieces of these shares."""
    return np.split(order, np.cumsum(sizes(len(order), shares)))[: len(shares)]


def parts(rows: int, shares: Sequence[float], by: str, values: np.ndarray | None, seed: int) -> list[np.ndarray]:
    """The rows of each part, rising."""
    rng = np.random.Generator(np.random.PCG64(seed))
    if by == "order":
        found = cut(np.arange(rows), shares)
    elif by == "random":
        found = cut(rng.permutation(rows), shares)
    else:
        assert values is not None
        _, codes = np.unique(values, return_inverse=True)
        found = (_stratified if by == "stratified" else _grouped)(codes.reshape(-1), shares, rng)
    return [np.sort(part) for part in found]


def _stratified(codes: np.ndarray, shares: Sequence[float], rng: np.random.Generator) -> list[np.ndarray]:
    """Every part has the same mixture of values, as nearly as whole rows allow."""
    # Rows of one value stand together, in random order; the k-th of n gets place (k + 0.5) / n. In the order of
    # places every value is spread evenly, so any cut has its share of each.
    shuffled = rng.permutation(len(codes))
    order = shuffled[np.argsort(codes[shuffled], kind="stable")]
    counts = np.bincount(codes) if len(codes) else np.zeros(0, int)
    within = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    place = (within + 0.5) / np.repeat(counts, counts) if len(codes) else within
    return cut(order[np.argsort(place, kind="stable")], shares)


def _grouped(codes: np.ndarray, shares: Sequence[float], rng: np.random.Generator) -> list[np.ndarray]:
    """All rows of a value are in one part: the largest groups first, each to the part that lacks most."""
    counts = np.bincount(codes) if len(codes) else np.zeros(0, int)
    lacking = np.array(sizes(len(codes), shares) + [0], float)
    lacking[-1] = len(codes) - lacking.sum()  # what no share wants
    open_ = [at for at in range(len(shares)) if shares[at] > 0] + ([len(shares)] if lacking[-1] > 0.5 else [])
    owner = np.zeros(len(counts), int)
    shuffled = rng.permutation(len(counts))
    for group in shuffled[np.argsort(-counts[shuffled], kind="stable")]:
        owner[group] = max(open_, key=lambda at: lacking[at])
        lacking[owner[group]] -= counts[group]
    return [np.flatnonzero(owner[codes] == at) if len(codes) else np.zeros(0, int) for at in range(len(shares))]
