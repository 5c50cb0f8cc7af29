"""Block-wise 8-bit quantization of floating point values, and its inverse.

Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), section 2.1: block-wise scales; the map
here is linear instead of dynamic, since activations are read once and not accumulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from memprof.policies.compress.policy import BLOCK, CHUNK, DEVICE_CHUNK

_TINY = torch.finfo(torch.float32).tiny


def to_eight_bits(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Quantises values to -127..127.

    Args:
        values: Floating point, contiguous, shape ``(n,)``.

    Returns:
        The codes, int8 of shape ``(n,)``, and a float32 scale for each block of BLOCK values; None where a value is
        not finite, since no scale could hold it.
    """
    codes = torch.empty(len(values), dtype=torch.int8, device=values.device)
    scales = torch.empty(-(-len(values) // BLOCK), dtype=torch.float32, device=values.device)
    for value, code, scale in _chunks(values, codes, scales):
        scale.copy_(torch.linalg.vector_norm(value, ord=torch.inf, dim=1)).div_(127.0)
        # A block of zeros has no scale: any non-zero divisor works.
        code.copy_((value / scale.clamp(min=_TINY)[:, None]).round_())
    return (codes, scales) if bool(torch.isfinite(scales).all()) else None


def from_eight_bits(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the values back.

    Args:
        codes: As `to_eight_bits` returned them.
        scales: The same.
        out: Where to, of the original element type, shape ``(n,)``.
    """
    for value, code, scale in _chunks(out, codes, scales):
        value.copy_(code).mul_(scale.to(value.dtype)[:, None])


def _chunks(
    values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Cuts all three into chunks, a block a row; a rest shorter than a block is a chunk of its own."""
    whole = len(values) // BLOCK * BLOCK
    bounds = [*range(0, whole, CHUNK if values.device.type == "cpu" else DEVICE_CHUNK), whole]
    for start, stop in itertools.pairwise(bounds):
        rows = slice(start // BLOCK, stop // BLOCK)
        yield values[start:stop].view(-1, BLOCK), codes[start:stop].view(-1, BLOCK), scales[rows]
    if whole < len(values):
        yield values[whole:][None], codes[whole:][None], scales[-1:]
