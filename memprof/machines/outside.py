"""What a process takes of a device outside torch's allocator: the CUDA context, kernels, library handles, NCCL.

No rule for it is public; these are intervals of published figures, each with its source. Plans leave the upper end of
LAZY free (`memprof.machines.catalogue.CONTEXT_BYTES`).
"""

from __future__ import annotations

from dataclasses import dataclass

from memprof.machines.catalogue import CONTEXT_BYTES

_MIB = 1 << 20


@dataclass(frozen=True)
class OutsideMemory:
    """An interval of bytes outside torch's allocator.

    Attributes:
        least_bytes: The smallest published figure.
        most_bytes: The largest, and room above it where plans depend on it.
        source: Of both.
    """

    least_bytes: int
    most_bytes: int
    source: str

    def with_communicators(self, count: int) -> OutsideMemory:
        """Returns the interval of a process that has NCCL communicators too.

        Args:
            count: How many it has.
        """
        if not count:
            return self
        return OutsideMemory(
            self.least_bytes + count * NCCL.least_bytes,
            self.most_bytes + count * NCCL.most_bytes,
            f"{self.source}; NCCL: {NCCL.source}",
        )


#: Where the driver loads kernels when they are first used: CUDA 11.7 or newer, torch 1.13 or newer.
LAZY = OutsideMemory(
    148 * _MIB,
    CONTEXT_BYTES,
    "processes without tensors hold 148 to 666 MiB in published out-of-memory messages; 274 MiB in "
    "github.com/pytorch/pytorch/pull/86509, 426 MiB on an RTX 6000 Ada in github.com/unslothai/unsloth-zoo/pull/1053",
)
#: Of one communicator, of two and of more ranks.
NCCL = OutsideMemory(544 * _MIB, 688 * _MIB, "four A100 with NVLink in github.com/NVIDIA/nccl/issues/964")
