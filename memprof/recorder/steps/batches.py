"""Inspects the batches that DataLoaders yield: operators do not show whether a batch can be split."""

from __future__ import annotations

import ast
import sys
from types import FunctionType
from typing import Any

import torch

from memprof.recorder.calls.recompiled import recompiled
from memprof.recorder.steps.batch_structure import batch_size, first_tensor, is_plain

_SEE = "__memprof_batch__"
#: Batches inspected before the others are assumed to be alike.
_ENOUGH = 4


class BatchObserver:
    """Inspects the first batches yielded while gradients are recorded.

    Attributes:
        undivided: Why none of them can be split into micro-batches, a clause; "" if one can, or none was seen, or
            inspecting their types would run code of the job's.
    """

    def __init__(self) -> None:
        """Starts without observing anything."""
        self.undivided = ""
        self._left = _ENOUGH
        self._function: FunctionType | None = None
        self._original: Any = None

    def install(self) -> None:
        """Starts inspecting, if torch's iterator is unmodified."""
        module = sys.modules.get("torch.utils.data.dataloader")
        function = None if module is None else vars(module._BaseDataLoaderIter).get("__next__")
        if not isinstance(function, FunctionType) or function.__closure__:
            return  # replaced by a policy or the job
        try:
            code = recompiled(function, _see_results)
        except RuntimeError:
            return  # another torch: the run will show what can be split
        function.__globals__[_SEE] = self._see
        self._function, self._original = function, function.__code__
        function.__code__ = code

    def remove(self) -> None:
        """Restores torch's own code."""
        if self._function is not None:
            self._function.__code__ = self._original
            self._function = None

    def _see(self, iterator: Any, batch: Any) -> Any:
        """Returns a batch after inspecting it."""
        if self._left > 0 and torch.is_grad_enabled():
            self._left -= 1
            try:
                self.undivided = _why_whole(batch, _expected_size(iterator))
            except Exception:  # noqa: BLE001 - nothing in here may reach the job: whether it can be split stays unknown
                self.undivided = ""
            if not self.undivided or not self._left:
                self.remove()
        return batch


def _see_results(definition: ast.FunctionDef) -> None:
    for node in ast.walk(definition):
        if isinstance(node, ast.Return) and node.value is not None:
            names = [ast.copy_location(ast.Name(name, ast.Load()), node.value) for name in (_SEE, "self")]
            call = ast.Call(names[0], [names[1], node.value], [])
            node.value = ast.copy_location(call, node.value)


def _expected_size(iterator: Any) -> int | None:
    """Returns a loader's batch size, None if a sampler of the job's own makes batches."""
    sampler = vars(iterator).get("_index_sampler")
    size = sampler.batch_size if type(sampler) is torch.utils.data.BatchSampler else None
    return size if isinstance(size, int) else None


def _why_whole(batch: Any, expected: int | None) -> str:
    """Returns why a batch cannot be split; "" if it can, or this is unknown."""
    with torch._C.DisableTorchFunction():
        if not is_plain(batch):
            return ""
        if type(batch) is list and batch and all(type(each) is dict for each in batch) and first_tensor(batch) is None:
            # Prompts, mostly, several times each: a loop that rewards completions compares those of a prompt.
            return "a DataLoader yields a list of records without tensors, which the loop may compare with one another"
        if batch_size(batch, expected) is not None:
            return ""
    held = f", and no tensor in it has the {expected} samples of the loader" if expected is not None else ""
    return f"a DataLoader yields a {type(batch).__name__}{held}"
