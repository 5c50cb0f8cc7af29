"""Lets a job disable saved-tensor hooks, as torch.func does inside its transforms, while a policy's are active.

torch refuses to disable them while any is active, since the tensors they keep would be lost. A policy's hooks are not
the job's: they are skipped there, and autograd keeps saved tensors as usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_autograd: Any = torch._C._autograd  # semi-private, and not annotated in torch
_NAME = "_saved_tensors_hooks_disable"
#: Modules whose hooks may be skipped. Those of swapped parameters may not: they hold a parameter in memory.
_SKIPPABLE = ("memprof.policies.remat.saved", "memprof.policies.swap.packing")


def step_aside_where_forbidden() -> None:
    """Makes torch ignore a policy's hooks where the job disables all, from now on and process-wide."""
    forbid = getattr(_autograd, _NAME, None)
    if forbid is None or hasattr(forbid, "__wrapped__"):
        return

    def forbid_others(error_message: str, fail_if_non_empty: bool = True) -> None:
        forbid(error_message, fail_if_non_empty and not _may_all_be_skipped())

    forbid_others.__wrapped__ = forbid  # type: ignore[attr-defined]  # a function takes any attribute
    setattr(_autograd, _NAME, forbid_others)


@contextmanager
def as_if_allowed() -> Iterator[None]:
    """Allows pushing and popping hooks where the job disables them; disables them again afterwards."""
    message = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if message is None:
        yield
        return
    _autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        _autograd._saved_tensors_hooks_disable(message, False)


def take_all_hooks() -> list[Any]:
    """Removes all hooks of this thread; returns them, the lowest first."""
    found = []
    while (pair := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        found.append(pair)
        _autograd._pop_saved_tensors_default_hooks()
    return found[::-1]


def _may_all_be_skipped() -> bool:
    """Whether every hook of this thread is a policy's and may be skipped; true without hooks."""
    with as_if_allowed():
        pairs = take_all_hooks()
        for pair in pairs:
            _autograd._push_saved_tensors_default_hooks(*pair)
    return all(getattr(pack, "__module__", None) in _SKIPPABLE for pack, _ in pairs)
