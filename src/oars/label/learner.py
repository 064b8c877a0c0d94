"""The model beside the people: it is fitted again in the background after every action, and guesses all other rows.

Which features it uses is decided by how well they separate the labels so far: from 50 labels on each candidate gets a
cross-validated balanced accuracy, again at each doubling and when more features have come. A guess is shown as a guess;
nothing here changes a label.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from oars.label.head import Head, balanced, clusters, scale, standard

ENOUGH = 50  # labels, from which on features are compared
SEPARATES = 0.15  # by so much the balanced accuracy must be better than chance
CLUSTERS = 20
TUNED = "fine-tuned"  # features of a network that has learnt from the labels (``tune.py``)


class Rows:
    """An array that becomes longer; what was read of it stays valid."""

    def __init__(self, first: np.ndarray) -> None:
        self._space, self._count = first, len(first)

    @property
    def values(self) -> np.ndarray:
        """All rows so far."""
        return self._space[:self._count]

    def add(self, more: np.ndarray) -> None:
        """Put rows at the end."""
        count = self._count + len(more)
        if count > len(self._space):
            space = np.empty((2 * count, *self._space.shape[1:]), self._space.dtype)
            space[:self._count] = self.values
            self._space = space
        self._space[self._count:count] = more
        self._count = count


class Guess:
    """What one fit thinks of every row."""

    def __init__(self, version: int, labels: int, name: str, features: np.ndarray, head: Head | None) -> None:
        self.version, self.labels, self.name, self.features = version, labels, name, features
        self.head = head
        if head is not None:
            self.best, self.second, self.p, self.margin = self._of(head, features)

    @staticmethod
    def _of(head: Head, features: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        chances = head.chances(features)
        order = np.argsort(-chances, 1)[:, :2]
        at = np.arange(len(features))
        p = chances[at, order[:, 0]]
        return head.classes[order[:, 0]], head.classes[order[:, 1]], p, p - chances[at, order[:, 1]]

    def grow(self, features: np.ndarray) -> None:
        """Think of the rows that have come since. Each array only becomes longer, so readers need no lock."""
        new = features[len(self.features):]
        if self.head is not None and len(new):
            best, second, p, margin = self._of(self.head, new)
            self.best, self.second = np.concatenate([self.best, best]), np.concatenate([self.second, second])
            self.p, self.margin = np.concatenate([self.p, p]), np.concatenate([self.margin, margin])
        self.features = features


class Learner:
    """Fits in a thread of its own, always to the newest labels; ``fitted`` is called after each fit."""

    def __init__(self, candidates: dict[str, np.ndarray], chosen: str | None, seed: int,
                 labelled: Callable[[], tuple[int, np.ndarray, np.ndarray]], fitted: Callable[[], None],
                 base: int | None = None) -> None:
        self._raw = {name: Rows(values) for name, values in candidates.items()}
        self._scales = {name: scale(values[:base]) for name, values in candidates.items()}  # later rows change nothing
        self._first = next(reversed(self._raw))  # the richest stands last
        self._chosen, self.seed = chosen, seed
        self._labelled, self._fitted = labelled, fitted
        self._growing = threading.RLock()
        self._standard: dict[str, Rows] = {}
        self._norms: dict[str, np.ndarray] = {}
        self._scored_at = 0
        self.scores: dict[str, float] = {}
        self.tuned: dict[str, Any] | None = None  # the exam with and without what was fine-tuned on so many labels
        self.classes_seen = 0
        self._guess: Guess | None = None
        self._clusters: tuple[np.ndarray, np.ndarray] | None = None
        self._wake = threading.Condition()
        self._wanted, self._done, self._ended = 1, 0, False
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._go_on, name="learner", daemon=True)
        self._thread.start()

    def again(self) -> None:
        """Labels have changed."""
        with self._wake:
            self._wanted += 1
            self._wake.notify_all()

    def end(self) -> None:
        """Stop after the fit that goes on."""
        with self._wake:
            self._ended = True
            self._wake.notify_all()
        self._thread.join(30)

    @property
    def busy(self) -> bool:
        """Whether there are labels that the guesses do not know yet."""
        return self._done != self._wanted and self.failed is None

    @property
    def guess(self) -> Guess | None:
        """The newest guesses; None before there are two classes."""
        found = self._guess
        return found if found is not None and found.head is not None else None

    @property
    def name(self) -> str:
        """The features in use."""
        return self._guess.name if self._guess else self.first()

    @property
    def features(self) -> np.ndarray:
        """Their values, standardised."""
        return self.values(self.name)

    @property
    def separates(self) -> bool | None:
        """Whether any features tell the classes apart; None while there are too few labels to say."""
        if not self.scores:
            return None
        return max(self.scores.values()) > 1 / max(2, self.classes_seen) + SEPARATES

    def values(self, name: str) -> np.ndarray:
        """Features by name, standardised once."""
        with self._growing:
            if name not in self._standard:
                self._standard[name] = Rows(standard(self._raw[name].values, self._scales[name]))
            return self._standard[name].values

    def grow(self, more: dict[str, np.ndarray]) -> None:
        """Rows that have come after the last: their features, and what the model thinks of them."""
        with self._growing:
            for name, raw in self._raw.items():
                if name in self._standard:
                    self._standard[name].add(standard(more[name], self._scales[name]))
                raw.add(more[name])
            if self._guess is not None:
                self._guess.grow(self.values(self._guess.name))

    def add(self, name: str, values: np.ndarray, chosen: bool) -> None:
        """Features that have come later: compared with the others at once, or ``chosen``: used from now on."""
        with self._growing:
            self._raw = {**self._raw, name: Rows(values)}
            self._scales[name] = scale(values)
            self._standard.pop(name, None)
            self._norms.pop(name, None)
            if chosen:
                self._chosen = name
        self.again()

    def tune(self, known: dict[str, Any], values: np.ndarray | None) -> None:
        """What came of fine-tuning; its features, if the exam is better with them: then they are used."""
        self.tuned = known
        if values is not None:
            self.add(TUNED, values, False)
        else:
            self._fitted()

    def norms(self, name: str) -> np.ndarray:
        """The squared length of each row of these features; computed once, for it costs more than a search."""
        values, known = self.values(name), self._norms.get(name, np.zeros(0, np.float32))
        if len(known) < len(values):
            new = values[len(known):]
            self._norms[name] = known = np.concatenate([known, np.einsum("ij,ij->i", new, new)])
        return known

    def groups(self) -> tuple[np.ndarray, np.ndarray]:
        """Clusters of all rows, for when there is no model; made anew when there are twice as many rows."""
        values = self.values(self.first())
        if self._clusters is None or len(values) > 2 * len(self._clusters[0]):
            self._clusters = clusters(values, CLUSTERS, self.seed)
        return self._clusters

    def first(self) -> str:
        """The features in use before any labels say which are best."""
        return self._chosen or self._first

    def _go_on(self) -> None:
        import torch

        torch.set_num_threads(1)  # the server and the browser need the other cores
        while True:
            with self._wake:
                while self._done == self._wanted and not self._ended:
                    self._wake.wait()
                if self._ended:
                    return
                wanted = self._wanted
            try:
                self._fit()
            except Exception as error:  # shown on the page; the next action tries again
                self.failed = f"the model could not be fitted: {error}"
            else:
                self.failed = None
            with self._wake:
                self._done = wanted
            self._fitted()

    def _fit(self) -> None:
        version, rows, labels = self._labelled()
        kinds, counts = np.unique(labels, return_counts=True)
        self.classes_seen = len(kinds)
        if len(rows) < self._scored_at // 2:  # undone: as if it had never been
            self._scored_at, self.scores = 0, {}
        compared = [name for name in self._raw if name != TUNED]
        fresh = any(name not in self.scores for name in compared)
        if len(rows) >= ENOUGH and (fresh or len(rows) >= 2 * self._scored_at) and (counts >= 2).sum() > 1:
            some = np.isin(labels, kinds[counts >= 2])
            self.scores = {name: balanced(self.values(name)[rows[some]], labels[some]) for name in compared}
            self._scored_at = len(rows)
        name = self._chosen or (max(self.scores, key=lambda one: self.scores[one]) if self.scores else self.first())
        if TUNED in self._raw and self.tuned and len(rows) >= self.tuned["labels"] // 2:
            name = TUNED
        features = self.values(name)
        head = Head(features[rows], labels) if len(kinds) > 1 else None
        guess = Guess(version, len(rows), name, features, head)
        with self._growing:
            guess.grow(self.values(name))  # what has come meanwhile
            self._guess = guess

    def table(self) -> list[dict[str, Any]]:
        """The features and how well each separates the labels."""
        tuned = [] if self.tuned is None else [{"name": f"{TUNED}, {self.tuned['labels']} labels", "balanced": None,
                                                "used": self.name == TUNED, "exam": round(self.tuned["exam"], 4),
                                                "before": round(self.tuned["before"], 4)}]
        return [{"name": name, "balanced": round(self.scores[name], 4) if name in self.scores else None,
                 "used": name == self.name} for name in self._raw if name != TUNED] + tuned
