"""Work areas of Fourier transforms on a card: cuFFT chooses their sizes within a documented range."""

from __future__ import annotations

#: cuFFT's documentation: between one and eight times the complex elements of a call, all batches together.
LEAST_TIMES, MOST_TIMES = 1, 8
SOURCE = (
    "docs.nvidia.com/cuda/cufft; plans for 512 x 512 elements, alone and 32 at a time, take once their size in "
    "github.com/JuliaGPU/CUDA.jl/issues/894, as do those for 100 rows in github.com/arrayfire/arrayfire/issues/1443"
)


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
