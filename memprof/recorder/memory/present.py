"""Writes what is alive now: the storages that Python and autograd hold, what each is for, and the devices' segments.

It is the recorder's own inventory, read once, with nothing installed in the job.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from memprof.recorder.calls.module_registry import ModuleRegistry
from memprof.recorder.calls.torch_state import untraced
from memprof.recorder.device_history import block_rows, segment_records
from memprof.recorder.device_sampling import Devices
from memprof.recorder.log import RawLog
from memprof.recorder.machine import describe_process
from memprof.recorder.memory.inventory import Inventory
from memprof.recorder.memory.kept import reachable, tensors_of_data
from memprof.recorder.memory.live_objects import live_objects, live_optimizers, one_search
from memprof.recorder.memory.references import local_values, running_frames
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.window import Window
from memprof.trace.files.spool import ACTIVATION, HELD, INPUT
from memprof.trace.files.spool_writer import SpoolWriter

#: Nodes of autograd's graphs that are looked at.
_MOST_NODES = 200_000
#: Batches are at most so deep in a variable (a tuple, dictionaries in it), and of so many tensors.
_BATCH_DEPTH, _MOST_IN_BATCH = 2, 64
_KINDS = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.utils.data.DataLoader)
_cuda: Any = torch.cuda  # not annotated in torch
_SAVED = "_raw_saved_"


def write_present(folder: Path) -> None:
    """Writes a spool of what is alive now.

    Args:
        folder: The folder of the spool, which must not exist.

    Raises:
        OSError: It cannot be written.
    """
    log = RawLog(SpoolWriter(folder))
    log.record("start", describe_process(Window(0, 1), is_late=True))
    with torch._C.DisableTorchFunction(), untraced(), torch.no_grad(), one_search(_KINDS, _reached):
        _write_objects(log)
    Devices(log).sample()
    if _cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        segments = torch.cuda.memory._snapshot()["segments"]
        log.record("segments", {"segments": segment_records(segments), "blocks": list(block_rows(segments))})
    log.sample_rss()
    log.close()


class _Once(Inventory):
    """States each tensor that training keeps once, under the first category found for it."""

    def __init__(self, log: RawLog, registry: ModuleRegistry, rounds: OptimizerRounds) -> None:
        super().__init__(log, registry, rounds)
        self._kept: set[int] = set()

    def _state(self, tensor: torch.Tensor, category: int, name: str, module: int) -> None:
        if id(tensor) in self._kept:
            return
        if category not in (ACTIVATION, HELD, INPUT):
            self._kept.add(id(tensor))
        super()._state(tensor, category, name, module)


def _write_objects(log: RawLog) -> None:
    rounds, registry = OptimizerRounds(), ModuleRegistry(log)
    inventory = _Once(log, registry, rounds)
    rounds.meet(live_optimizers(is_late=False))
    registry.scan()
    inventory.models()
    for optimizer in rounds.alive():
        inventory.optimizer_state(optimizer)
        inventory.gradients(optimizer)
    tensors = live_objects(torch.Tensor)
    names: dict[int, str] = {}
    for name, value in _variables():
        for one in _tensors_in(value, _BATCH_DEPTH):
            names.setdefault(id(one), name)  # the script's own first: functions may hold the dictionary of all of them
    computed = inventory.tensors(tensors)
    for tensor in tensors:
        if id(tensor) in names and not tensor.requires_grad:
            inventory.variable(tensor, names[id(tensor)])
    for name, tensor in _saved(computed):
        inventory.saved(tensor, name)
    inventory.inputs((tensors_of_data(),), {})


def _variables() -> Iterator[tuple[str, Any]]:
    """Yields the names of the job's variables and their values."""
    yield from list(vars(sys.modules["__main__"]).items())
    for frame in running_frames():
        yield from local_values(frame).items()


def _tensors_in(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """Yields the tensors of a batch, without running code of the job's types."""
    if issubclass(type(value), torch.Tensor):
        yield value
    elif depth and type(value) in (list, tuple, dict) and len(value) <= _MOST_IN_BATCH:
        for one in value.values() if type(value) is dict else value:
            yield from _tensors_in(one, depth - 1)


def _reached() -> list[Any]:
    return reachable([value for _, value in _variables() if not issubclass(type(value), ModuleType)])


def _saved(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that autograd's graphs have saved, each with its operator; hooks of the job are not called.

    Args:
        tensors: Tensors with a graph.
    """
    waiting: list[Any] = []
    for tensor in tensors:
        try:
            waiting.append(tensor.grad_fn)
        except RuntimeError:  # one of several views whose base was written to
            continue
    seen: set[Any] = set()
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        kind = type(node)
        for name in dir(kind):
            if name.startswith(_SAVED):
                yield from ((kind.__name__, each) for each in _read(node, name))
        if issubclass(kind, torch.autograd.function.BackwardCFunction):  # a Function of the job's
            yield from ((kind.__name__, each) for each in _read_own(node))


def _read(node: Any, name: str) -> Iterator[torch.Tensor]:
    try:
        found = getattr(node, name)
        values = [getattr(each, "data", None) for each in (found if isinstance(found, tuple) else (found,))]
    except RuntimeError:  # freed by backward
        return
    yield from (each for each in values if isinstance(each, torch.Tensor))


def _read_own(node: Any) -> Iterator[torch.Tensor]:
    yield from (each for each in vars(node).values() if issubclass(type(each), torch.Tensor))
    if hasattr(node, "_raw_saved_tensors"):
        yield from _read(node, "_raw_saved_tensors")
