"""Runs a script on fake tensors alone, counts storages as others do, and prints the highest count as JSON.

python fake_counts.py naive|MemTracker SCRIPT [ARGUMENT]...
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Counts the bytes of the storages that operators return, each until it is freed.

    Attributes:
        peak_bytes: Highest count so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator and counts what is new in its result."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if (key := id(storage)) in self._storages:
            return
        size_bytes = storage.nbytes()

        def forget(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._storages[key]
            self._live_bytes -= size_bytes

        self._storages[key] = weakref.ref(storage, forget)
        self._live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)


@contextmanager
def _naive() -> Iterator[Callable[[], int]]:
    with LiveStorages() as storages:
        yield lambda: storages.peak_bytes


@contextmanager
def _mem_tracker() -> Iterator[Callable[[], int]]:
    tracker, backward = MemTracker(), torch.Tensor.backward

    def backward_and_reset(*args: Any, **kwargs: Any) -> None:
        """It follows one iteration of the modules, and is to be told where it ends: there may be many a step."""
        backward(*args, **kwargs)
        tracker.reset_mod_stats()

    torch.Tensor.backward = backward_and_reset  # type: ignore[method-assign]
    with tracker:
        yield lambda: sum(int(parts["Total"]) for parts in tracker.get_tracker_snapshot("peak").values())


def _convert(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Moves or converts a module's tensors by replacing them with new ones; shared ones are no longer shared.

    Module._apply swaps fake tensors instead, which fails in torch 2.13, because of weak references to them.
    """
    for child in module.children() if recurse else ():
        _convert(child, function)
    with torch.no_grad():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(function(parameter), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = function(buffer)
    return module


_COUNTERS = {"naive": _naive, "MemTracker": _mem_tracker}


def main() -> None:
    """Runs the script."""
    counter, script, *arguments = sys.argv[1:]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    output, sys.stdout = sys.stdout, Path(os.devnull).open("w")  # noqa: SIM115 - lives as long as the process
    nn.Module._apply = _convert  # type: ignore[method-assign]
    with FakeTensorMode(), _COUNTERS[counter]() as peak_bytes:
        runpy.run_path(script, run_name="__main__")
        peak = peak_bytes()
    print(json.dumps({"peak_bytes": peak}), file=output)


if __name__ == "__main__":
    main()
