"""Reads which modules the variables of a compiled function hold, while its compiled code runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType

import torch

#: How the names begin that TorchDynamo gives to compiled graphs in the functions that call them.
_COMPILED = "__compiled_fn"
#: Names of functions that give the job the dictionary of its variables, which reading them would change.
_READERS = frozenset({"dir", "eval", "exec", "locals", "vars"})
#: Before Python 3.13, reading a frame's variables leaves references to them in a dictionary until the frame ends.
_LEAVES_COPIES = sys.version_info < (3, 13)
_MOST_FRAMES = 40


class LocalModules:
    """Finds the function that runs compiled code, and its modules: one graph may run for several of them."""

    def __init__(self) -> None:
        """Starts without known functions."""
        self._known: dict[CodeType, bool] = {}

    def find(self, frame: FrameType, variables: Iterable[str]) -> dict[str, torch.nn.Module]:
        """Returns the modules that some variables of the compiled function hold.

        Args:
            frame: A frame called by it, such as that of generated code.
            variables: Names of its variables.
        """
        here: FrameType | None = frame
        for _ in range(_MOST_FRAMES):
            if here is None or self._is_compiled(here.f_code):
                break
            here = here.f_back
        if here is None or not self._is_compiled(here.f_code) or not _can_read(here.f_code):
            return {}
        values = here.f_locals
        found = {name: values[name] for name in variables if isinstance(values.get(name), torch.nn.Module)}
        if _LEAVES_COPIES:
            values.clear()
        return found

    def _is_compiled(self, code: CodeType) -> bool:
        found = self._known.get(code)
        if found is None:
            found = self._known[code] = any(name.startswith(_COMPILED) for name in code.co_names)
        return found


def _can_read(code: CodeType) -> bool:
    """Whether reading a function's variables changes nothing that the job can see."""
    if not code.co_flags & CO_OPTIMIZED:
        return False  # a module or a class, whose variables are the dictionary itself
    return not _LEAVES_COPIES or (sys.gettrace() is None and _READERS.isdisjoint(code.co_names))
