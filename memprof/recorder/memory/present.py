"""Writes what is alive now: the storages that Python and autograd hold, what each is for, and the devices' segments.

It is the recorder's own inventory, read once, with nothing installed in the job.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from memprof.recorder.calls.module_registry import ModuleRegistry
from memprof.recorder.calls.torch_state import untraced
from memprof.recorder.device_history import block_rows, segment_records
from memprof.recorder.device_sampling import Devices
from memprof.recorder.log import RawLog
from memprof.recorder.machine import describe_process
from memprof.recorder.memory.inventory import Inventory, is_computed
from memprof.recorder.memory.kept import tensors_of_data
from memprof.recorder.memory.live_objects import live_objects, live_optimizers, one_search
from memprof.recorder.memory.references import read_locals, running_frames
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.window import Window
from memprof.trace.files.spool_writer import SpoolWriter

#: Nodes of autograd's graphs that are looked at.
_MOST_NODES = 200_000
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
    with torch._C.DisableTorchFunction(), untraced(), torch.no_grad(), one_search(_KINDS):
        rounds, registry = OptimizerRounds(), ModuleRegistry(log)
        inventory = Inventory(log, registry, rounds)
        rounds.meet(live_optimizers(is_late=False))
        registry.scan()
        inventory.held(None)
        inventory.outside.abandon()  # it has logged what it found, and nothing is followed
        inventory.models()
        for optimizer in rounds.alive():
            inventory.optimizer_state(optimizer)
            inventory.gradients(optimizer)
        tensors, names = live_objects(torch.Tensor), _variables()
        for tensor in tensors:
            if id(tensor) in names and not is_computed(tensor) and not tensor.requires_grad:
                inventory.variable(tensor, names[id(tensor)])
        for name, tensor in _saved(tensor for tensor in tensors if is_computed(tensor)):
            inventory.saved(tensor, name)
        inventory.inputs((tensors_of_data(),), {})
    Devices(log).sample()
    if _cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        segments = torch.cuda.memory._snapshot()["segments"]
        log.record("segments", {"segments": segment_records(segments), "blocks": list(block_rows(segments))})
    log.sample_rss()
    log.close()


def _variables() -> dict[int, str]:
    """Returns the names of the job's variables by the identity of their values."""
    found = {id(value): name for name, value in list(vars(sys.modules["__main__"]).items())}
    for frame in running_frames():
        found.update((number, name) for name, number in read_locals(frame).items())
    return found


def _saved(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that autograd's graphs have saved, each with its operator; hooks of the job are not called."""
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
    yield from (each for each in vars(node).values() if isinstance(each, torch.Tensor))
    if hasattr(node, "_raw_saved_tensors"):
        yield from _read(node, "_raw_saved_tensors")
