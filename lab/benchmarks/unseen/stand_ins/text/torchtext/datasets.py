"""Pairs of sentences of random words, from 3 to 20 words long."""

from __future__ import annotations

import random
from types import SimpleNamespace

multi30k = SimpleNamespace(URL={})
WORDS = 60


def Multi30k(split: str, language_pair: tuple[str, str]) -> list[tuple[str, str]]:  # noqa: N802 - torchtext's name
    """Returns pairs of sentences; the same ones in every run."""
    draw = random.Random(split)
    lengths = [draw.randint(3, 20) for _ in range(96 if split == "train" else 32)]
    return [(_sentence(draw, "a", length), _sentence(draw, "b", length)) for length in lengths]


def _sentence(draw: random.Random, language: str, length: int) -> str:
    return " ".join(f"{language}{draw.randrange(WORDS)}" for _ in range(length))
