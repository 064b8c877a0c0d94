"""The model beside the people: it is fitted again in the background after every action, and guesses all other rows.

Which features it uses is decided by how well they separate the labels so far: from 50 labels on each candidate gets a
cross-validated balanced accuracy, again at each doubling. A guess is shown as a guess; nothing here changes a label.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from oars.label.head import Head, balanced, clusters, standard

ENOUGH = 50  # labels, from which on features are compared
SEPARATES = 0.15  # by so much the balanced accuracy must be better than chance
CLUSTERS = 20


class Guess:
    """What one fit thinks of every row."""

    def __init__(self, version: int, labels: int, name: str, features: np.ndarray, head: Head | None) -> None:
        self.version, self.labels, self.name, self.features = version, labels, name, features
        self.head = head
        if head is not None:
            chances = head.chances(features)
            order = np.argsort(-chances, 1)[:, :2]
            at = np.arange(len(features))
            self.best, self.second = head.classes[order[:, 0]], head.classes[order[:, 1]]
            self.p = chances[at, order[:, 0]]
            self.margin = self.p - chances[at, order[:, 1]]


class Learner:
    """Fits in a thread of its own, always to the newest labels; ``told`` is called after each fit."""

    def __init__(self, candidates: dict[str, np.ndarray], chosen: str | None, seed: int,
                 labelled: Callable[[], tuple[int, np.ndarray, np.ndarray]], told: Callable[[], None]) -> None:
        self._raw, self._chosen, self.seed = candidates, chosen, seed
        self._labelled, self._told = labelled, told
        self._standard: dict[str, np.ndarray] = {}
        self._norms: dict[str, np.ndarray] = {}
        self._scored_at = 0
        self.scores: dict[str, float] = {}
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
        return self._guess.name if self._guess else self._first()

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
        if name not in self._standard:
            self._standard[name] = standard(self._raw[name])
        return self._standard[name]

    def norms(self, name: str) -> np.ndarray:
        """The squared length of each row of these features; computed once, for it costs more than a search."""
        if name not in self._norms:
            self._norms[name] = np.einsum("ij,ij->i", self.values(name), self.values(name))
        return self._norms[name]

    def groups(self) -> tuple[np.ndarray, np.ndarray]:
        """Clusters of all rows, for when there is no model."""
        if self._clusters is None:
            self._clusters = clusters(self.values(self._first()), CLUSTERS, self.seed)
        return self._clusters

    def _first(self) -> str:
        return self._chosen or next(reversed(self._raw))  # the richest stands last

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
            self._told()

    def _fit(self) -> None:
        version, rows, labels = self._labelled()
        kinds, counts = np.unique(labels, return_counts=True)
        self.classes_seen = len(kinds)
        if len(rows) < self._scored_at // 2:  # undone: as if it had never been
            self._scored_at, self.scores = 0, {}
        if len(rows) >= max(ENOUGH, 2 * self._scored_at) and (counts >= 2).sum() > 1:
            some = np.isin(labels, kinds[counts >= 2])
            self.scores = {name: balanced(self.values(name)[rows[some]], labels[some]) for name in self._raw}
            self._scored_at = len(rows)
        name = self._chosen or (max(self.scores, key=lambda one: self.scores[one]) if self.scores else self._first())
        features = self.values(name)
        head = Head(features[rows], labels) if len(kinds) > 1 else None
        self._guess = Guess(version, len(rows), name, features, head)

    def table(self) -> list[dict[str, Any]]:
        """The features and how well each separates the labels."""
        return [{"name": name, "balanced": round(self.scores[name], 4) if name in self.scores else None,
                 "used": name == self.name} for name in self._raw]
