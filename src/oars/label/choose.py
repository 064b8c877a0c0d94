"""Which rows to show: groups of alike ones, the most doubtful ones, the most alike ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from oars.label.head import clusters
from oars.label.learner import Learner

_COLD_PAGE = 30  # images on a page whose rows no model has sorted
_START = 20  # labels; with fewer, typical images teach more than doubtful ones


def groups(learner: Learner, still: np.ndarray, size: int, count: int) -> list[dict[str, Any]]:
    """Pages of rows that are probably one class, the surest first; ``still`` are the rows without a label."""
    guess = learner.guess
    if guess is None:
        of, far = learner.groups()
        still = still[still < len(of)]  # rows may have come since
        found = []
        for cluster in np.argsort(-np.bincount(of[still], minlength=of.max() + 1), kind="stable"):
            rows = still[of[still] == cluster]
            if len(rows):
                rows = rows[np.argsort(far[rows], kind="stable")][:min(size, _COLD_PAGE)]
                found.append({"id": f"cluster-{cluster}-{rows[0]}", "rows": rows.tolist(), "guess": None, "p": None})
        return found[:count]
    best, p = guess.best[still], guess.p[still]
    pages = []
    for label in np.unique(best):
        rows = still[best == label]
        rows = rows[np.argsort(-p[best == label], kind="stable")]
        for at in range(0, len(rows), size):
            pages.append((int(label), at // size, rows[at:at + size]))
    # Full pages first: a label for 60 costs as much as one for 6. Of these the surest.
    pages.sort(key=lambda page: (len(page[2]) < size, -float(guess.p[page[2]].mean())))
    return [{"id": f"{guess.version}-{label}-{at}", "rows": page.tolist(), "guess": label,
             "p": round(float(guess.p[page].mean()), 4)} for label, at, page in pages[:count]]


def split(learner: Learner, rows: np.ndarray) -> list[np.ndarray]:
    """A group cut in two: by the guesses if they differ, else by likeness."""
    if len(rows) < 2:
        return [rows]
    guess = learner.guess
    if guess is not None and len(np.unique(guess.best[rows])) > 1:
        return [rows[guess.best[rows] == label] for label in np.unique(guess.best[rows])]
    of, _ = clusters(learner.features[rows], 2, learner.seed)
    return [rows[of == half] for half in (0, 1) if (of == half).any()]


def boundary(learner: Learner, still: np.ndarray, labelled: np.ndarray, count: int) -> list[int]:
    """The rows whose label would teach most: typical ones at first, then those with the smallest margin."""
    guess = learner.guess
    if guess is None or len(labelled) < _START:
        return typical(learner, still, labelled, count)
    return [int(row) for row in still[np.argsort(guess.margin[still], kind="stable")][:count]]


def typical(learner: Learner, still: np.ndarray, labelled: np.ndarray, count: int) -> list[int]:
    """From each cluster without a label, largest first, the row that lies most densely."""
    x = learner.features
    both = np.concatenate([still, labelled])
    if len(still) == 0:
        return []
    of, _ = clusters(x[both], min(len(labelled) + count, 500), learner.seed, 10)
    has = np.bincount(of[len(still):], minlength=of.max() + 1) > 0
    size = np.bincount(of[:len(still)], minlength=of.max() + 1)
    found: list[int] = []
    for cluster in np.lexsort((-size, has)):
        rows = still[of[:len(still)] == cluster][:400]
        if len(rows) < 3:
            continue
        some = x[rows]
        norms = (some ** 2).sum(1)
        away = np.sqrt(np.maximum(0, norms[:, None] + norms - 2 * some @ some.T))
        near = min(20, len(rows) - 1)
        found.append(int(rows[np.partition(away, near, 1)[:, :near + 1].mean(1).argmin()]))
        if len(found) == count:
            return found
    rest = np.setdiff1d(still, found)
    more = np.random.default_rng(learner.seed).permutation(rest)[:count - len(found)]
    return found + [int(row) for row in more]


def near(features: np.ndarray, norms: np.ndarray, row: int, count: int) -> list[int]:
    """The rows most like this one, exactly: every row is compared. ``norms`` are the squared lengths of the rows."""
    away = norms - 2 * (features @ features[row])
    count = min(count + 1, len(features))
    rows = np.argpartition(away, count - 1)[:count]
    rows = rows[np.argsort(away[rows], kind="stable")]
    return [int(other) for other in rows if other != row][:count - 1]
