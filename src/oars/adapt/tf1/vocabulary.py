"""``tf.contrib.learn.preprocessing.VocabularyProcessor``: texts become rows of numbers of words."""

from __future__ import annotations

import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

_WORD = re.compile(r"[A-Z][A-Z]+(?![a-z])|[A-Z][a-z]+(?=[A-Z])|[-'\w]+")  # vocabularies of then have such words


def tokenizer(texts: Iterable[str]) -> Iterator[list[str]]:
    """The words of each text."""
    for text in texts:
        yield _WORD.findall(text)


class CategoricalVocabulary:
    """Words and their numbers; 0 is a word that is not known. Until it is frozen, a new one gets the next number."""

    def __init__(self, unknown_token: str = "<UNK>") -> None:
        self._mapping, self._words, self._frozen = {unknown_token: 0}, [unknown_token], False
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._words)

    def freeze(self, freeze: bool = True) -> None:
        """No more new words."""
        self._frozen = freeze

    def get(self, category: str) -> int:
        """Its number."""
        if category not in self._mapping:
            if self._frozen:
                return 0
            self._mapping[category] = len(self._words)
            self._words.append(category)
        return self._mapping[category]

    def add(self, category: str, count: int = 1) -> None:
        """It was met so many times."""
        if self.get(category):
            self._counts[category] += count

    def trim(self, min_frequency: int) -> None:
        """Keep what is not rarer; the most frequent come first."""
        kept = sorted(sorted(self._counts.items()), key=lambda item: -item[1])
        self._words[1:] = [word for word, count in kept if count > min_frequency]
        self._mapping = {word: i for i, word in enumerate(self._words)}

    def reverse(self, class_id: int) -> str:
        """The word of this number."""
        return self._words[class_id]


class VocabularyProcessor:
    """Of each text its first words, as numbers; the rest of a row is 0."""

    def __init__(self, max_document_length: int, min_frequency: int = 0,
                 vocabulary: CategoricalVocabulary | None = None,
                 tokenizer_fn: Callable[[Iterable[str]], Iterable[list[str]]] | None = None) -> None:
        self.max_document_length, self.min_frequency = max_document_length, min_frequency
        self.vocabulary_ = CategoricalVocabulary() if vocabulary is None else vocabulary
        self._tokenizer = tokenizer_fn or tokenizer

    def fit(self, raw_documents: Iterable[str], unused_y: object = None) -> VocabularyProcessor:
        """Learn the words."""
        for tokens in self._tokenizer(raw_documents):
            for token in tokens:
                self.vocabulary_.add(token)
        if self.min_frequency > 0:
            self.vocabulary_.trim(self.min_frequency)
        self.vocabulary_.freeze()
        return self

    def transform(self, raw_documents: Iterable[str]) -> Iterator[np.ndarray]:
        """A row for each text."""
        for tokens in self._tokenizer(raw_documents):
            row = np.zeros(self.max_document_length, np.int64)
            found = [self.vocabulary_.get(token) for token in tokens[: self.max_document_length]]
            row[: len(found)] = found
            yield row

    def fit_transform(self, raw_documents: Iterable[str], unused_y: object = None) -> Iterator[np.ndarray]:
        """Both."""
        self.fit(raw_documents)
        return self.transform(raw_documents)

    def reverse(self, documents: Iterable[Iterable[int]]) -> Iterator[str]:
        """The words again."""
        for row in documents:
            yield " ".join(self.vocabulary_.reverse(i) for i in row)

    def save(self, filename: str) -> None:
        """Keep it in a file."""
        with open(filename, "wb") as file:
            pickle.dump(self, file)

    @classmethod
    def restore(cls, filename: str) -> VocabularyProcessor:
        """From such a file."""
        with open(filename, "rb") as file:
            return pickle.load(file)
