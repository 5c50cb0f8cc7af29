"""What a process may take of a device beyond the tensors that were counted, which whatever must fit leaves free."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import numpy as np

from memprof.machines.budget import Room
from memprof.machines.catalogue import CONTEXT_BYTES
from memprof.machines.outside import (
    LAZY,
    NCCL,
    NCCL_FAR,
    NCCL_PEER,
    OutsideMemory,
    work_area_interval,
    workspace_interval,
)
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.schema import Ops, Storages, Uses
from memprof.trace.store import Trace

#: Operators whose kernels are cuDNN's convolutions, and cuFFT's transforms.
_CONVOLUTION, _TRANSFORM = re.compile(r"aten\.(cudnn_)?convolution"), re.compile(r"aten\._fft_")


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
    known = {
        "convolutions, which cuDNN chooses": _convolution_bytes(trace),
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
    estimated, used = _calls(trace, _CONVOLUTION)
    weights = used.requested_bytes[used.category == "parameter"]
    return workspace_interval(estimated, int(weights.max(initial=0))) if len(used) else (0, 0)


def _transform_bytes(trace: Trace) -> tuple[int, int]:
    """Returns the same for Fourier transforms."""
    estimated, used = _calls(trace, _TRANSFORM)
    return work_area_interval(estimated, int(used.requested_bytes.max(initial=0)))


def _calls(trace: Trace, names: re.Pattern[str]) -> tuple[int, Storages]:
    """Returns the largest workspace that was counted for operators of these names, and the storages they use."""
    ops, uses, storages = trace.table(Ops), trace.table(Uses), trace.table(Storages)
    is_one = np.array([names.match(str(name)) is not None for name in ops.name], dtype=np.bool_)
    used = np.isin(storages.storage_id, uses.storage_id[np.isin(uses.op_id, ops.op_id[is_one])])
    return int(ops.workspace_bytes[is_one].max(initial=0)), storages.take(used)
