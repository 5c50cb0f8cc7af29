"""Packs tensors that the modules of a real job save for backward into 8 bits."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from memprof.policies.compress.policy import BLOCK, CHUNK, DEVICE_CHUNK
from memprof.policies.plan.patterns import match_modules
from memprof.policies.runtime.job import Job
from memprof.policies.swap.packing import NOTHING_TAKEN, SavedTensors

if TYPE_CHECKING:
    from memprof.policies.compress.policy import Compress


class _Compressed:
    """One storage in 8 bits; after its first use, in full precision until autograd releases it.

    Attributes:
        original: The storage, as long as it is referenced.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.original = weakref.ref(storage)
        self._dtype, self._size_bytes, self._device = tensor.dtype, storage.nbytes(), tensor.device
        self.take_again(storage)

    def take_again(self, storage: torch.UntypedStorage) -> None:
        self._packed = to_eight_bits(_values(storage, self._dtype, self._device))
        # Values that no scale can represent stay as they are.
        self._full = storage if self._packed is None else None

    def restored(self) -> torch.UntypedStorage:
        if self._full is None:
            original = self.original()
            if original is not None:
                return original
            assert self._packed is not None
            codes, scales = self._packed
            out = torch.empty(self._size_bytes // self._dtype.itemsize, dtype=self._dtype, device=self._device)
            from_eight_bits(codes, scales, out)
            self._full, self._packed = out.untyped_storage(), None
        return self._full


class _Compressor:
    """Packs floating point storages above a minimum size."""

    def __init__(self, minimum_bytes: int) -> None:
        self._minimum_bytes = minimum_bytes

    def takes(self, tensor: torch.Tensor) -> bool:
        size = tensor.untyped_storage().nbytes()
        return (
            tensor.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
            and size >= max(self._minimum_bytes, 1)
            and size % tensor.dtype.itemsize == 0
        )

    def take(self, tensor: torch.Tensor) -> _Compressed:
        return _Compressed(tensor)

    def flush(self) -> None:
        pass


def apply(job: Job, policy: Compress) -> None:
    """Installs the policy.

    Raises:
        PolicyError: A pattern matches nothing.
    """
    names = match_modules(policy.modules, job.modules_named())
    effect = job.expect(policy.describe(), NOTHING_TAKEN)
    SavedTensors(job.model, _Compressor(policy.minimum_bytes), effect).install(job, names)
    job.notes.append("compress: saved activations are rounded to 8 bits, so gradients are approximate")


def _values(storage: torch.UntypedStorage, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a whole storage as one row of values."""
    values = torch.empty(0, dtype=dtype, device=device)
    return values.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


# Block-wise 8-bit quantization of floating point values, and its inverse.
#
# Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022), section 2.1: block-wise scales; the
# map here is linear instead of dynamic, since activations are read once and not accumulated.

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
