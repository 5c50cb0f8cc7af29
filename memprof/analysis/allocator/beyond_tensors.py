"""What a process may take of a device beyond the tensors that were counted, which whatever must fit leaves free."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from memprof.machines.catalogue import CONTEXT_BYTES
from memprof.machines.convolutions import workspace_interval
from memprof.machines.outside import LAZY, OutsideMemory
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.schema import Ops, Storages, Uses
from memprof.trace.store import Trace

#: Operators whose kernels are cuDNN's convolutions.
_CONVOLUTION = re.compile(r"aten\.(cudnn_)?convolution")


@dataclass(frozen=True)
class BeyondTensors:
    """Memory that no rule gives to the byte.

    Attributes:
        outside: Outside torch's allocator.
        convolution_bytes: How much less and more tensors may take for workspaces of convolutions.
    """

    outside: OutsideMemory
    convolution_bytes: tuple[int, int]

    @property
    def room_bytes(self) -> int:
        """What is left free of a device's budget, which is without the context already."""
        return self.outside.most_bytes - CONTEXT_BYTES + self.convolution_bytes[1]


def beyond_tensors(trace: Trace, world_size: int = 1) -> BeyondTensors:
    """Returns what a recorded job may take of a card beyond its tensors.

    Args:
        trace: The recording. What a real card allocated for convolutions is among its tensors.
        world_size: Ranks that the job is to have, if they are more than the recorded ones.
    """
    is_distributed = max(trace.manifest.world_size, world_size) > 1
    is_measured = trace.manifest.machine.device_kind != "cpu" and trace.manifest.backend.name != DRY_RUN
    convolutions = (0, 0) if is_measured else _convolution_bytes(trace)
    return BeyondTensors(LAZY.with_communicators(int(is_distributed)), convolutions)


def _convolution_bytes(trace: Trace) -> tuple[int, int]:
    """Returns how much less and more a job may take for workspaces of convolutions; zeros where none ran."""
    ops, uses, storages = trace.table(Ops), trace.table(Uses), trace.table(Storages)
    is_one = np.array([_CONVOLUTION.match(str(name)) is not None for name in ops.name], dtype=np.bool_)
    if not is_one.any():
        return 0, 0
    used = uses.storage_id[np.isin(uses.op_id, ops.op_id[is_one])]
    is_weight = np.isin(storages.storage_id, used) & (storages.category == "parameter")
    weight = int(storages.requested_bytes[is_weight].max(initial=0))
    return workspace_interval(int(ops.workspace_bytes[is_one].max()), weight)
