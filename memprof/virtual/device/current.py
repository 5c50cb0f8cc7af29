"""Where a job of a dry run allocates: its device among its machine's, the current stream, a CUDA graph's pool."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

#: Version of NCCL reported to a job.
_NCCL = (2, 27, 7)


class Current:
    """The stream and the pool of this process.

    Attributes:
        stream: Number, index and type of the current stream, as torch sets it; () for the default one.
        owner: Number of the pool of the graph being captured; 0 for the default pool.
        captures: Graphs captured so far.
        attends: The job is inside scaled_dot_product_attention's composite of other operators.
    """

    def __init__(self) -> None:
        """Starts on the default stream, without a graph."""
        self.stream: tuple[int, int, int] | tuple[()] = ()
        self.owner = 0
        self.captures = 0
        self.attends = False
        self._numbers = itertools.count(1)
        self._owners: dict[Any, int] = {}

    @property
    def is_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.owner != 0

    def new_pool(self) -> tuple[int, int]:
        """Returns the identifier of a new pool."""
        return 0, next(self._numbers)

    def capture_into(self, pool: tuple[int, int]) -> None:
        """Allocates from a pool until ``end_capture``.

        Raises:
            RuntimeError: A graph is being captured.
        """
        if self.is_capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        self.owner = self._owners.setdefault(pool, len(self._owners) + 1)
        self.captures += 1

    def end_capture(self) -> None:
        """Allocates from the default pool again.

        Raises:
            RuntimeError: No graph is being captured.
        """
        if not self.is_capturing:
            raise RuntimeError("Called CUDAGraph::capture_end without a preceding capture_begin.")
        self.owner = 0


#: Those of this process.
CURRENT = Current()


class Ordinals:
    """The devices of a machine, of which the process uses one: the first that it selects by index, or else 0.

    Attributes:
        count: How many devices the machine has.
        index: The one whose memory is simulated.
        is_fixed: Whether it has had memory in use; from then on, every index refers to it.
    """

    def __init__(self) -> None:
        """Starts with a machine of one device."""
        self.count = 1
        self.index = 0
        self.is_fixed = False

    def check(self, device: Any) -> None:
        """Raises CUDA's error for a device beyond the last.

        Args:
            device: An index, or a device in any form that torch accepts; without an index it is the current one.

        Raises:
            RuntimeError: There is no such device.
        """
        self._checked_index(device)

    def use(self, device: Any) -> None:
        """Makes a device the one that is simulated, unless another is in use.

        Raises:
            RuntimeError: There is no such device.
        """
        index = self._checked_index(device)
        if index is not None and index >= 0 and not self.is_fixed:
            self.index = index

    def current(self) -> torch.device:
        """Returns the simulated device as Python sees it."""
        return torch.device("cuda", self.index)

    def _checked_index(self, device: Any) -> int | None:
        index: int | None = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= self.count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return index


#: The devices of this process's machine.
ORDINALS = Ordinals()


def install() -> None:
    """Puts the functions into ``torch._C``, where a build for the processor has none."""
    written = {
        "_scatter": _scatter,
        "_gather": _gather,
        "_broadcast": _broadcast,
        "_broadcast_coalesced": lambda tensors, devices, *_: [_on(devices, list(tensors))],
        "_nccl_version": lambda: (_NCCL[0] << 32) | (_NCCL[1] << 16) | _NCCL[2],
        "_nccl_version_suffix": lambda: b"",
    }
    for name, function in written.items():
        setattr(torch._C, name, function)
    profiler: Any = torch.autograd.profiler
    profiler.profile.__init__ = _without_events(profiler.profile.__init__)


def _on(devices: Any, tensors: Any) -> Any:
    for device in devices:
        ORDINALS.check(device)
    return tensors


def _scatter(tensor: Any, devices: Any, _sizes: Any = None, dim: int = 0, _streams: Any = None) -> list[Any]:
    return [each.to("cuda") for each in _on(devices, tensor.chunk(len(devices), dim))]


def _gather(tensors: Any, dim: int, _destination: Any = None) -> Any:
    return torch.cat(list(tensors), dim)


def _broadcast(tensor: Any, devices: Any) -> list[Any]:
    return [tensor.to("cuda") for _ in _on(devices, devices)]


def _without_events(begin: Callable[..., None]) -> Callable[..., None]:
    """Returns the beginning of a profile in which no events of CUDA are recorded: torch would print that it cannot."""

    @wraps(begin)
    def without(profile: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_device") == "cuda":
            kwargs["use_device"], kwargs["use_cpu"] = None, True
        begin(profile, *args, **kwargs)

    return without
