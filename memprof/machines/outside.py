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

    def plus(self, other: OutsideMemory, count: int) -> OutsideMemory:
        """Returns the interval of what takes this, and so many times another interval.

        Args:
            other: The other interval.
            count: How many times; 0 returns this one.
        """
        if not count:
            return self
        return OutsideMemory(
            self.least_bytes + count * other.least_bytes,
            self.most_bytes + count * other.most_bytes,
            f"{self.source}; {other.source}",
        )


#: Where the driver loads kernels when they are first used: CUDA 11.7 or newer, torch 1.13 or newer.
LAZY = OutsideMemory(
    148 * _MIB,
    CONTEXT_BYTES,
    "processes without tensors hold 148 to 666 MiB in published out-of-memory messages; 274 MiB in "
    "github.com/pytorch/pytorch/pull/86509, 426 MiB on an RTX 6000 Ada in github.com/unslothai/unsloth-zoo/pull/1053",
)
#: Of one NCCL communicator that runs collectives. Memory is proportional to communicators and to their channels
#: (github.com/NVIDIA/nccl/issues/986).
NCCL = OutsideMemory(
    155 * _MIB,
    688 * _MIB,
    "NCCL: 544 MiB for two ranks and 688 MiB for more on four A100 with NVLink in github.com/NVIDIA/nccl/issues/964, "
    "3.5 times less where connections are made when first used, from NCCL 2.22 on (NVIDIA's announcement of it)",
)
#: Of one rank on the same machine, to which a communicator sends or from which it receives.
NCCL_PEER = OutsideMemory(
    24 * _MIB,
    447 * _MIB,
    "sends: 10 and 2 MiB a channel, and 3.28 GB for seven peers of eight H100 in github.com/NVIDIA/nccl/issues/1685; "
    "two channels a peer on H20 in github.com/NVIDIA/nccl/issues/1189",
)
#: Of a communicator that sends to other machines: one buffer that all such peers share.
NCCL_FAR = OutsideMemory(0, 512 * _MIB, "between machines: 512 MiB in github.com/NVIDIA/nccl/issues/2363")
