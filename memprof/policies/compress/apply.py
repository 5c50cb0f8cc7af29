"""Packs tensors that the modules of a real job save for backward into 8 bits."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from memprof.policies.compress.eight_bits import from_eight_bits, to_eight_bits
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
