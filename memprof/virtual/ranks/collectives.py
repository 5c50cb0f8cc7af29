"""Collectives as operators: those that return one of their arguments, and the process groups that they use."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.calls.dispatch_modes import tensors_in

_FUNCTIONAL: Any = torch.ops._c10d_functional
_FIRST = ("wait_tensor", "all_reduce_", "broadcast_", "all_reduce_coalesced_")
_OUT = ("all_gather_into_tensor_out", "reduce_scatter_tensor_out")


def _operators(names: tuple[str, ...]) -> frozenset[Any]:
    """Returns operators by their names; a torch without distributed has none."""
    packets = [getattr(_FUNCTIONAL, name, None) for name in names]
    return frozenset(packet.default for packet in packets if packet is not None)


_RETURNS_FIRST, _RETURNS_OUT = _operators(_FIRST), _operators(_OUT)


def returned_argument(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the argument that a collective returns unchanged; None for other operators."""
    if func in _RETURNS_FIRST:
        return args[0]
    return kwargs["out"] if func in _RETURNS_OUT else None


#: Collectives on several tensors at once, for which torch has no kernel on tensors without memory.
COALESCED = tuple(
    f"{name}_coalesced_" for name in ("allreduce", "allgather", "allgather_into_tensor", "reduce_scatter_tensor")
)


def coalesced_work(func: Any, args: Any) -> Any:
    """Returns the work of a collective on several tensors at once; None for other operators."""
    space, _, name = str(func.name()).partition("::") if hasattr(func, "name") else ("", "", "")
    if space != "c10d" or name not in COALESCED:
        return None
    # The work of any other operator on the same group is the same: it is complete.
    return torch.ops.c10d.send(list(tensors_in(args)), args[place_of_group(func)], 0, 0)


#: Names of the parameters for a process group: an object, or its name.
_GROUPS = ("process_group", "group_name")


@cache
def place_of_group(func: Any) -> int:
    """Returns the place of the process group among a collective's arguments; -1 for all other operators.

    Sends and receives are not collectives.
    """
    space, _, name = str(func.name()).partition("::") if hasattr(func, "name") else ("", "", "")
    if space not in ("c10d", "_c10d_functional") or name.startswith(("send", "recv")):
        return -1
    names = [one.name for one in func._schema.arguments]
    return next((names.index(one) for one in _GROUPS if one in names), -1)


def connects_all(func: Any) -> bool:
    """Whether a collective sends from each rank to each other one."""
    return "alltoall" in str(func).replace("_", "")


def device_group(func: Any, args: Any) -> Any:
    """Returns the process group of a collective on the virtual device; None for others."""
    place = place_of_group(func)
    is_barrier = func is torch.ops.c10d.barrier.default  # NCCL's runs on the device
    if place >= len(args) or not (is_barrier or any(map(_is_on_device, tensors_in(args)))):
        return None
    return resolve_group(args[place])


def resolve_group(group: Any) -> Any:
    """Returns a process group.

    Args:
        group: The argument of a collective: the group's name, or the group as C++ passes it.
    """
    groups: Any = torch.distributed.distributed_c10d
    return groups._resolve_process_group(group) if isinstance(group, str) else groups.ProcessGroup.unbox(group)


def _is_on_device(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda"
