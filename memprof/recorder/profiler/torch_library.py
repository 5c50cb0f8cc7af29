"""Opens torch's shared libraries and finds their variables."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def open_library(names: Sequence[str]) -> Any:
    """Returns the first of torch's libraries with one of these names, opened with ctypes; None if there is none."""
    folder = Path(torch.__file__).parent / "lib"
    for name in names:
        if (folder / name).exists():
            try:
                return ctypes.CDLL(str(folder / name))
            except OSError:
                return None
    return None


def find_variable(library: Any, name: str, kind: Any) -> Any:
    """Returns a variable of a library, None if it exports none of that name.

    Args:
        library: The library; None if there is none.
        name: The variable's symbol.
        kind: Its ctypes type.
    """
    try:
        return None if library is None else kind.in_dll(library, name)
    except ValueError:
        return None
