"""Turns what a sparse kernel returned into fake tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memprof.recorder.dry.spans import internal
from memprof.recorder.dry.sparse.fakes import (
    Pattern,
    is_coalesced,
    is_sparse,
    make,
    pattern_of,
    replace,
    spread_pattern,
    values_of,
)
from memprof.recorder.dry.sparse.kernels import Run
from memprof.recorder.memory.parts import parts_of

_LISTS = (list, tuple)


class Results:
    """Turns a kernel's results into fake tensors that share memory with its arguments where the real ones do."""

    def __init__(self, mode: FakeTensorMode, func: Any, device: torch.device, given: Any, run: Run) -> None:
        """Pairs an operator's arguments with those of its kernel.

        Args:
            mode: The dry run's mode, off.
            func: The operator.
            device: Where its result is.
            given: Its arguments.
            run: Its kernel's run on the processor.
        """
        self._mode = mode
        self._device = device
        self._is_on_device = device.type != "cpu"
        # CUDA's kernel sorts the only row of indices in place (cuda/SparseCUDATensor.cu).
        self._keeps_rows = func is torch.ops.aten._coalesce.default
        self._func = func
        self._is_certain = True
        self._given: dict[int, torch.Tensor] = {}
        self._sources: dict[int, torch.Tensor] = {}
        for tensor, reference in run.plain:
            storage = reference()
            if storage is not None:
                self._sources[storage._cdata] = tensor
        self._note(given, run.args)

    def of(self, value: Any) -> Any:
        """Returns a result, or the argument that the kernel returned, in its new state."""
        if isinstance(value, _LISTS):
            return type(value)(self.of(each) for each in value)
        if not isinstance(value, torch.Tensor):
            return value
        given = self._given.get(id(value))
        if given is None:
            return self._sparse(value) if is_sparse(value) else self._plain(value)
        if is_sparse(value) and isinstance(given, FakeTensor) and not self._is_unchanged(given, value):
            replace(given, self._sparse(value))
        return given

    def _note(self, given: Any, real: Any) -> None:
        for one, other in zip(given, real, strict=True):
            if isinstance(one, _LISTS):
                self._note(one, other)
            elif isinstance(one, torch.Tensor):
                self._given[id(other)] = one
                self._is_certain = self._is_certain and self._has_certain_places(one)

    def _has_certain_places(self, one: torch.Tensor) -> bool:
        """Whether the places of a sparse argument are certain, or the values of one that may select places."""
        if is_sparse(one):
            return pattern_of(one).is_certain
        if self._func is torch.ops.aten._embedding_bag_backward.default:
            return True  # only its second argument selects places
        return one.is_floating_point() or one.is_complex() or values_of(one) is not None

    def _is_unchanged(self, given: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether a sparse tensor still has the parts that it had before the operator wrote to it."""
        return pattern_of(given).is_coalesced == is_coalesced(value) and all(
            self._sources.get(new.untyped_storage()._cdata) is old and new.shape == old.shape
            for old, new in zip(parts_of(given), parts_of(value), strict=True)
        )

    def _sparse(self, value: torch.Tensor) -> FakeTensor:
        parts = tuple(map(self._plain, parts_of(value)))
        return make(self._mode, value.layout, tuple(value.shape), parts, self._pattern(value), self._device)

    def _pattern(self, value: torch.Tensor) -> Pattern:
        """Returns the pattern of a kernel's result; if one of an argument is not certain, as spread as it can be."""
        indices = parts_of(value)[:-1]
        if not self._is_certain and value.layout is torch.sparse_coo:
            rows, count = indices[0].shape
            return spread_pattern(tuple(value.shape[:rows]), count, is_coalesced=is_coalesced(value))
        if self._is_on_device:  # whose kernels return no views of longer indices
            indices = tuple(each if each.is_contiguous() else internal(each.contiguous()) for each in indices)
        return Pattern(indices, self._is_certain, is_coalesced(value))

    def _plain(self, value: torch.Tensor) -> torch.Tensor:
        key = value.untyped_storage()._cdata
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = self._new(value)
        if self._is_on_device and value.shape == source.shape:
            return source
        if not isinstance(source, FakeTensor):
            return source.as_strided(value.shape, value.stride(), value.storage_offset())
        with torch.no_grad(), self._mode:
            return source.as_strided(value.shape, value.stride(), value.storage_offset())

    def _new(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a fake tensor of a new storage's size; on a device, of the tensor's own."""
        internal(value)  # values of indices stay in the pattern
        is_whole = self._is_on_device and not (self._keeps_rows and value.dtype is torch.int64 and len(value) == 1)
        count = value.untyped_storage().nbytes() // value.element_size()
        with torch.no_grad(), self._mode:
            return torch.empty(tuple(value.shape) if is_whole else (count,), dtype=value.dtype, device=self._device)
