"""Remembers the shapes of what a dry run would have saved, for a job that loads it again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True)
class _Shape:
    """A tensor without its memory."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Files:
    """Stands in for `torch.save`, which would write values that nobody computed, and for `torch.load` of them."""

    def __init__(self, count_left_out: Callable[[str], None]) -> None:
        """Remembers nothing yet.

        Args:
            count_left_out: Told of everything that was not written.
        """
        self._count_left_out = count_left_out
        self._load = torch.load
        self._saved: dict[Any, Any] = {}

    def save(self, obj: Any, f: Any, *_: Any, **__: Any) -> None:
        """Takes the place of `torch.save`."""
        self._count_left_out("torch.save wrote nothing")
        self._saved[_place(f)] = (f, _shapes(obj))  # the file object is kept: another must not get its number

    def load(self, f: Any, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of `torch.load`."""
        if _place(f) in self._saved:
            return _tensors(self._saved[_place(f)][1])
        return self._load(f, *args, **kwargs)


def _place(file: Any) -> Any:
    return Path(file).resolve() if isinstance(file, (str, os.PathLike)) else id(file)


def _shapes(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return _Shape(value.shape, value.stride(), value.dtype)
    if isinstance(value, dict):
        return {key: _shapes(item) for key, item in value.items()}
    return type(value)(_shapes(item) for item in value) if type(value) in (list, tuple) else value


def _tensors(value: Any) -> Any:
    if isinstance(value, _Shape):
        return torch.empty_strided(value.size, value.stride, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: _tensors(item) for key, item in value.items()}
    return type(value)(_tensors(item) for item in value) if type(value) in (list, tuple) else value
