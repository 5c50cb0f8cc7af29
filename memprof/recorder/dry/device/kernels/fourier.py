"""Temporary memory of Fourier transforms (aten/src/ATen/native/cuda/SpectralOps.cpp)."""

from __future__ import annotations

from typing import Any

from memprof.machines.fourier import LEAST_TIMES


def fourier_sizes(args: Any, result: Any) -> list[int]:
    """Returns a call's work area: once the elements of its complex side, the least that cuFFT documents."""
    transformed = result if result.is_complex() else args[0]
    return [transformed.nbytes * LEAST_TIMES]


def inverse_real_sizes(args: Any, result: Any) -> list[int]:
    """Returns the same and a copy of the input, which cuFFT overwrites."""
    return [args[0].nbytes, *fourier_sizes(args, result)]
