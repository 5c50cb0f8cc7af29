"""What a job does by itself: modules it compiles, parts it runs again in backward, hooks it disables.

torch refuses to disable saved-tensor hooks while any is active, since the tensors they keep would be lost. A policy's
hooks are not the job's: they are skipped there, and autograd keeps saved tensors as usual.
"""

from __future__ import annotations

import importlib
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any

import torch

from memprof.errors import PolicyError
from memprof.policies.rewrite.stack_marks import SAVES_ITSELF
from memprof.policies.runtime.forwards import outermost_layer
from memprof.policies.runtime.job import Job
from memprof.policies.runtime.replaced import replace_weakly
from memprof.recorder.calls.stacks import records_again

_sequence_number = torch._C._autograd._get_sequence_nr
#: Calls of a model that are remembered: more than backward can still reach in any loop.
_MOST_CALLS = 4096
_autograd: Any = torch._C._autograd  # semi-private, and not annotated in torch
_NAME = "_saved_tensors_hooks_disable"
#: Modules whose hooks may be skipped. Those of swapped parameters may not: they hold a parameter in memory.
_SKIPPABLE = ("memprof.policies.remat.saved", "memprof.policies.swap.packing")


class OwnReruns:
    """Gives a context to what the job's own functions run again, if their forward was in one of the noted regions.

    torch's checkpoints restore autocast themselves; functions of a job rarely do (torch.amp.custom_bwd would).
    """

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        """Stores the context; changes nothing."""
        self._context = context
        #: First number of autograd nodes in each region, and the one after its last.
        self._regions: deque[tuple[int, int]] = deque(maxlen=_MOST_CALLS)
        #: Whether the backward of a function runs again, read once: each of its nodes asks.
        self._runs_again: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()

    def install(self) -> Callable[[], Any]:
        """Starts, for as long as this object lives; returns a function that ends it."""
        return replace_weakly(torch.autograd.function.BackwardCFunction, "apply", self._apply)

    @contextmanager
    def region(self) -> Iterator[None]:
        """Notes the nodes that are made inside."""
        first = _sequence_number()
        try:
            yield
        finally:
            last = _sequence_number()
            if last > first:
                self._regions.append((first, last))

    def _apply(self, before: Any, node: Any, *gradients: Any) -> Any:
        function = type(node)._forward_cls
        if function not in self._runs_again:
            self._runs_again[function] = _runs_again(function)
        if not self._runs_again[function]:
            return before(node, *gradients)
        number = node._sequence_nr()
        if not any(first <= number < last for first, last in self._regions):
            return before(node, *gradients)
        with self._context():
            return before(node, *gradients)


def _runs_again(function: type[torch.autograd.Function]) -> bool:
    backward = inspect.unwrap(function.backward)
    return isinstance(backward, FunctionType) and records_again(backward)


def find_compiled(job: Job, names: Iterable[str] = ("",)) -> str | None:
    """Returns the name of a compiled module around or within the named ones, "" for the model; None without any."""
    if job.is_compiled:
        return ""
    compiled = [name for name, module in job.modules_named().items() if is_compiled(module)]
    chosen = list(names)
    return next(
        (each for each in compiled if any(_is_within(each, one) or _is_within(one, each) for one in chosen)), None
    )


def import_compiler() -> None:
    """Imports torch's compiler, as its checkpoints and modes do when first called, in a thread of its own.

    The import leaves reference cycles that hold all frames below it, with their tensors: for good where the garbage
    collector is off. None of these frames may be the job's.
    """
    try:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(importlib.import_module, "torch._dynamo").result()
    except RuntimeError:  # the job trains while the interpreter ends, when no thread can be started any more
        importlib.import_module("torch._dynamo")


def is_compiled(module: torch.nn.Module) -> bool:
    """Returns whether calls of a module run compiled code."""
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    forwards = vars(module).get("forward"), outermost_layer(module)
    return any(hasattr(forward, "_torchdynamo_orig_callable") for forward in forwards)


def require_eager(job: Job, names: Iterable[str], policy: str) -> None:
    """Rejects modules whose saved tensors compiled code would handle.

    Raises:
        PolicyError: One of them is compiled, or contains or is in one that is.
    """
    compiled = find_compiled(job, names)
    if compiled is not None:
        raise PolicyError(SAVES_ITSELF.format(what=compiled or "the model", policy=policy))


def _is_within(name: str, other: str) -> bool:
    return not other or name == other or name.startswith(f"{other}.")


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
