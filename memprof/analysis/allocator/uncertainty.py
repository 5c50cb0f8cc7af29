"""What counted tensors leave open: what else a process takes of a device, and the torch that is assumed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import numpy as np

from memprof.machines.budget import Room
from memprof.machines.card import LT_WORKSPACE_BYTES, Architecture, architecture_of
from memprof.machines.catalogue import CONTEXT_BYTES, machine_of_device
from memprof.machines.outside import (
    LAZY,
    NCCL,
    NCCL_FAR,
    NCCL_PEER,
    OutsideMemory,
    work_area_interval,
    workspace_interval,
)
from memprof.replay.live import sum_during
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.operator_facts import CONVOLUTIONS, FOURIER_TRANSFORMS, are_among
from memprof.trace.schema import Memory, Ops, Storages, Uses
from memprof.trace.store import Trace
from memprof.units import format_bytes_between

_Version = tuple[int, int]
#: The versions that a range is given for.
_VERSIONS: tuple[_Version, ...] = (*((1, minor) for minor in range(8, 14)), *((2, minor) for minor in range(16)))

#: The first whose fully_shard reduces short gradients in the type of the parameters where the job chooses none.
_FULL_REDUCTION: _Version = (2, 15)


@dataclass(frozen=True)
class BeyondTensors:
    """Memory that no rule gives to the byte.

    Attributes:
        outside: Outside torch's allocator.
        workspace_bytes: How much less and more tensors may take for the workspaces of one call of cuDNN or cuFFT.
        chosen_for: What these are for, a clause; "" without any.
    """

    outside: OutsideMemory
    workspace_bytes: tuple[int, int]
    chosen_for: str

    @property
    def room_bytes(self) -> int:
        """What is left free of a device's budget, which is without the context already."""
        return self.outside.most_bytes - CONTEXT_BYTES + self.workspace_bytes[1]


def beyond_tensors(trace: Trace, world_size: int = 1) -> BeyondTensors:
    """Returns what a recorded job may take of a card beyond its tensors.

    Args:
        trace: The recording. What a real card allocated for convolutions is among its tensors.
        world_size: Ranks that the job is to have, if they are more than the recorded ones.
    """
    made, is_distributed = trace.manifest.communicators, max(trace.manifest.world_size, world_size) > 1
    outside = (
        LAZY.plus(NCCL, made.count or int(is_distributed))  # recordings of older versions do not count them
        .plus(NCCL_PEER, made.near_peers)
        .plus(NCCL_FAR, made.sending_far)
    )
    if trace.manifest.machine.device_kind != "cpu" and trace.manifest.backend.name != DRY_RUN:
        return BeyondTensors(outside, (0, 0), "")
    asked = trace.manifest.machine.cudnn
    known = {
        f"convolutions, {f'as cuDNN {asked} states them' if asked else 'which cuDNN chooses'}": _convolution_bytes(
            trace
        ),
        "Fourier transforms, which cuFFT chooses": _transform_bytes(trace),
    }
    less, more = (tuple(ends) for ends in zip(*known.values(), strict=True))
    chosen_for = ", and of ".join(words for words, ends in known.items() if ends[1])
    return BeyondTensors(outside, (min(less), max(more)), chosen_for)


def room_of(trace: Trace, world_size: int = 1) -> Room:
    """Returns what computes, once, the bytes that a device's budget leaves free; arguments as for `beyond_tensors`."""
    return cache(lambda: beyond_tensors(trace, world_size).room_bytes)


def _convolution_bytes(trace: Trace) -> tuple[int, int]:
    """Returns how much less and more a job may take for workspaces of convolutions; zeros where none ran."""
    estimated, used = _calls(trace, CONVOLUTIONS)
    weights = used.requested_bytes[used.category == "parameter"]
    is_asked = bool(trace.manifest.machine.cudnn)
    return workspace_interval(estimated, int(weights.max(initial=0)), is_asked=is_asked) if len(used) else (0, 0)


def _transform_bytes(trace: Trace) -> tuple[int, int]:
    """Returns the same for Fourier transforms."""
    estimated, used = _calls(trace, FOURIER_TRANSFORMS)
    return work_area_interval(estimated, int(used.requested_bytes.max(initial=0)))


def _calls(trace: Trace, operators: frozenset[str]) -> tuple[int, Storages]:
    """Returns the largest workspace that was counted for some operators, and the storages they use."""
    ops, uses, storages = trace.table(Ops), trace.table(Uses), trace.table(Storages)
    is_one = are_among(ops.name, operators)
    used = np.isin(storages.storage_id, uses.storage_id[np.isin(uses.op_id, ops.op_id[is_one])])
    return int(ops.workspace_bytes[is_one].max(initial=0)), storages.take(used)


def describe_torch(trace: Trace) -> str:
    """Returns a clause on the torch of a dry run: ``assumes torch 2.13.0; the project asks for torch==2.4 (...)``.

    Where the project asks for another, or for none in particular, the bytes that these would take follow, as far as
    versions are known to differ (`change_between`).

    Args:
        trace: The recording; "" is returned for one that is no dry run.
    """
    manifest = trace.manifest
    if manifest.backend.name != DRY_RUN:
        return ""
    pin, version = manifest.torch_pin, manifest.torch_version.partition("+")[0]
    words, (major, minor) = f"assumes torch {version}", version.split(".")[:2]
    assumed, versions = (int(major), int(minor)), versions_of(pin)
    if versions == (assumed,):
        return words
    words += f"; the project asks for {pin}" if pin else ""
    machine = machine_of_device(manifest.machine.device_name)
    architecture = None if machine is None else architecture_of(machine.capability)
    memory = trace.table(Memory)
    on_card = memory.reserved_bytes >= 0
    if architecture is None or not on_card.any() or not versions:
        return words
    peaks = int(memory.allocated_bytes[on_card].max()), int(memory.reserved_bytes[on_card].max())
    handles = int(np.count_nonzero(trace.table(Storages).name == "cuBLAS workspace"))
    more = _widened_bytes(trace, assumed)
    ends = np.array([change_between(architecture, assumed, each, handles, *peaks, more) for each in versions])
    if not ends.any():
        return words
    between = [
        f"{what} {format_bytes_between(peak + int(ends[:, i].min()), peak + int(ends[:, i + 1].max()))}"
        for what, peak, i in zip(("allocated", "reserved"), peaks, (0, 2), strict=True)
    ]
    named = "" if pin else "; torch {}.{} to {}.{}".format(*versions[0], *versions[-1])
    return f"{words}{named}: {', '.join(between)}"


def _widened_bytes(trace: Trace, assumed: _Version) -> int:
    """Returns what fully_shard's buffers of 16-bit gradients take more at most in float32, that of the parameters.

    Without ``reduce_dtype``, torch 2.15 and newer reduce in the type of the parameters, older ones in that of the
    computation (torch/distributed/fsdp/_fully_shard/_fsdp_api.py). Buffers of the other type were chosen by the job.
    """
    names, uses, storages = trace.columns(Ops, "name")["name"], trace.table(Uses), trace.table(Storages)
    is_copy = np.array([str(name).startswith("fsdp.chunk_cat") for name in names.distinct])[names.codes][uses.op_id]
    used, is_read = uses.storage_id[is_copy], uses.role[is_copy] == "read"
    is_short = np.isin(storages.dtype, ("bfloat16", "float16"))
    is_full = assumed >= _FULL_REDUCTION
    buffers = np.unique(used[~is_read])
    buffers = buffers[is_short[buffers] != is_full]
    if is_short[storages.category == "parameter"].any() or not is_short[used[is_read]].any() or not len(buffers):
        return 0
    more = storages.requested_bytes[buffers] // (2 if is_full else 1)
    return int(sum_during(storages.take(buffers), len(names), more).max())


def change_between(
    architecture: Architecture,
    assumed: _Version,
    other: _Version,
    handles: int,
    allocated: int,
    reserved: int,
    widened: int = 0,
) -> tuple[int, int, int, int]:
    """Returns the fewest and the most bytes that another version allocates beyond one, and reserves.

    Args:
        architecture: Torch's behaviour on the card.
        assumed: The version whose bytes are known.
        other: The other one.
        handles: Handles of cuBLAS.
        allocated: Allocated bytes under the known one.
        reserved: Reserved bytes under it.
        widened: What buffers of reduced gradients take more in the type of the parameters.
    """
    less = handles * (architecture.older_workspace_bytes - architecture.cublas_workspace_bytes)
    # The first version, the first that does not any more, and how many bytes more than the newest it takes: what is
    # known from recordings of real cards (docs/how-true.md), to the byte where it is workspaces.
    known: tuple[tuple[_Version, _Version, float, float], ...] = (
        ((2, 9), (2, 12), 0, handles * LT_WORKSPACE_BYTES),  # kept by cuBLASLt (pull request 156495)
        ((1, 0), (2, 9), 0, handles * LT_WORKSPACE_BYTES),  # allocated for each call
        ((1, 0), (2, 12), less, less),
        ((1, 0), (2, 0), -0.03 * allocated, 0.2 * allocated),  # three TimeSformers and SlowFasts of torch 1.x
        (_FULL_REDUCTION, (3, 0), 0, widened),
    )
    least = most = 0.0
    for since, before, *bounds in known:
        sign = (since <= other < before) - (since <= assumed < before)
        ends = sorted(sign * each for each in bounds)
        least, most = least + ends[0], most + ends[1]
    apart = 0.01 * reserved * ((other < (2, 12)) is not (assumed < (2, 12)))
    return round(least), round(most), round(least - apart), round(most + apart)


def versions_of(requirement: str) -> tuple[_Version, ...]:
    """Returns the versions that a requirement such as ``torch>=2.0,<2.5`` allows; those from 2.0 on for "" ."""
    signs = re.findall(r"(===?|[<>~!]=|[<>=^~])\s*v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", requirement)
    signs = signs or [(">=", "2", "0", "")]
    return tuple(each for each in _VERSIONS if all(_allows(each, *sign) for sign in signs))


def _allows(version: _Version, sign: str, major: str, minor: str, patch: str) -> bool:
    bound, is_last = (int(major), int(minor or 0)), bool(patch and int(patch))
    if sign == "^" or (sign in ("=", "==", "===", "~=", "~") and not minor) or (sign == "~=" and not patch):
        return version >= bound and version[0] == bound[0]
    return {
        "<": version < bound or (is_last and version == bound),
        "<=": version <= bound,
        ">": version > bound or (version == bound and bool(minor)),
        ">=": version >= bound,
        "!=": version != bound or bool(patch),
    }.get(sign, version == bound)
