"""Vocabularies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Vocabulary:
    """Numbers of words."""

    def __init__(self, words: Sequence[str]) -> None:
        self.numbers = {word: number for number, word in enumerate(words)}
        self.default = 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __call__(self, words: Iterable[str]) -> list[int]:
        return [self.numbers.get(word, self.default) for word in words]

    def __getitem__(self, word: str) -> int:
        return self.numbers[word]

    def set_default_index(self, number: int) -> None:
        """Sets the number of unknown words."""
        self.default = number


def build_vocab_from_iterator(
    sentences: Iterable[Iterable[str]], min_freq: int, specials: Sequence[str], special_first: bool
) -> Vocabulary:
    """Returns the vocabulary of the words of sentences, special ones first."""
    return Vocabulary([*specials, *dict.fromkeys(word for words in sentences for word in words)])
