"""Tells which cases only `make test-all` runs: those that slow_cases.toml lists."""

from __future__ import annotations

import tomllib
from pathlib import Path

_SLOW_CASES: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def is_slow_case(name: str) -> bool:
    """Tells whether a test, by pytest's name for it, is left to `make test-all`."""
    file, _, case = name.partition("::")
    return any(words in case for words in _SLOW_CASES.get(file, ()))
