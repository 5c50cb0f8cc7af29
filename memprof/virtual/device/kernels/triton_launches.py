"""Launches of Triton kernels, as libraries of fused losses and norms write them: on a simulated device they do nothing.

A kernel reads and writes tensors that exist; whatever it allocates, its caller allocates before it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

_TRITON = "triton"
#: Packages whose own searches are not the job's.
_NOT_THE_JOB = ("importlib", "_frozen_importlib", "torch", "memprof")


class _Searches:
    """Finds nothing, and notes which packages look for Triton where it is not installed: those may run other code."""

    def __init__(self) -> None:
        self.packages: list[str] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Is called when no other finder has found a module."""
        if name == _TRITON:
            package = _caller(sys._getframe(1))
            if package not in (*_NOT_THE_JOB, *self.packages):
                self.packages.append(package)
        return None


_SEARCHES = _Searches()


def install() -> None:
    """Replaces what compiles and launches a kernel, which asks the driver of a real GPU.

    Where Triton is not installed, the packages that look for it are noted.
    """
    if importlib.util.find_spec(_TRITON) is None:
        sys.meta_path.append(_SEARCHES)
        return
    for module, name in (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner")):
        getattr(importlib.import_module(module), name).run = _run


def notes() -> list[str]:
    """Returns a note where the job looked for Triton without finding it."""
    if not _SEARCHES.packages:
        return []
    packages = ", ".join("the script" if name == "__main__" else name for name in _SEARCHES.packages)
    note = (
        f"Triton is not installed, and {packages} looked for it: what runs instead of its kernels can take several "
        "times the memory; install it (pip install triton) to dry-run what the card would run"
    )
    return [note]


def _caller(frame: FrameType | None) -> str:
    """Returns the package of the code that imports or looks for a module."""
    package = ""
    while frame is not None and (not package or package in _NOT_THE_JOB[:2]):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        frame = frame.f_back
    return package


def _run(_kernel: Any, *_args: Any, **_options: Any) -> None:
    """Launches nothing."""
