"""What a process takes of a device outside tensors: the CUDA context, and areas whose size cuDNN and cuFFT choose.

No rule for it is public; these are intervals of published figures, each with its source. Plans leave the upper end of
LAZY free (`memprof.machines.catalogue.CONTEXT_BYTES`).
"""

from __future__ import annotations

from dataclasses import dataclass

from memprof.machines.catalogue import CONTEXT_BYTES

_MIB = 1 << 20
#: Most bytes of a call, and in backward the weight's besides.
MOST_CONVOLUTION_BYTES = 128 << 20
#: Partial sums of as many tiles of 128 x 256 numbers as the largest cards have multiprocessors, about.
MOST_PARTIAL_BYTES = 16 << 20
CONVOLUTIONS_SOURCE = (
    "a snapshot of a ResNet-50 under torch 2.1, in which 26 of 53 convolutions take 134,217,728 bytes and gradients of "
    "weights as many and the weight's"
)
#: cuFFT's documentation: between one and eight times the complex elements of a call, all batches together.
LEAST_TIMES, MOST_TIMES = 1, 8
TRANSFORMS_SOURCE = (
    "docs.nvidia.com/cuda/cufft; plans for 512 x 512 elements, alone and 32 at a time, take once their size in "
    "github.com/JuliaGPU/CUDA.jl/issues/894, as do those for 100 rows in github.com/arrayfire/arrayfire/issues/1443"
)


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


def workspace_interval(estimated_bytes: int, weight_bytes: int, *, is_asked: bool = False) -> tuple[int, int]:
    """Returns how much less and how much more a job may take than with the estimated workspaces.

    One call runs at a time, and its workspace is freed after it: the peak differs by one call's at most.

    Args:
        estimated_bytes: The largest workspace estimated for a call.
        weight_bytes: The largest weight of a convolution.
        is_asked: cuDNN stated them: partial sums of one wave of blocks are what it may choose otherwise.

    Returns:
        A number that is not positive, and one that is positive.
    """
    if is_asked:
        return -min(estimated_bytes, MOST_PARTIAL_BYTES), MOST_PARTIAL_BYTES
    return -estimated_bytes, MOST_CONVOLUTION_BYTES + weight_bytes


def work_area_interval(estimated_bytes: int, transformed_bytes: int) -> tuple[int, int]:
    """Returns how much less and how much more a job may take than with the estimated work areas.

    One call runs at a time, and its work area is freed after it.

    Args:
        estimated_bytes: The largest one estimated for a call.
        transformed_bytes: The largest tensor of a call.

    Returns:
        Zero, as the least is estimated, and a number that is not negative.
    """
    return 0, max(0, MOST_TIMES * transformed_bytes - estimated_bytes)
