"""Runs the processor's kernels of sparse tensors on zeros, and turns their results into fake tensors."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _profiler
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memprof.recorder.calls.dispatch_modes import tensors_in
from memprof.recorder.memory.tensor_memory import parts_of
from memprof.recorder.profiler.native import allocations, highest_of, in_time
from memprof.recorder.profiler.sessions import short_session
from memprof.virtual.tensors.fakes import (
    Pattern,
    internal,
    is_coalesced,
    is_sparse,
    make,
    pattern_of,
    replace,
    spread_pattern,
    values_of,
)
from memprof.virtual.values.known import known

_LISTS = (list, tuple)
#: Zeros of more bytes are left as the system hands them out: pages that no kernel reads take no memory.
_ZEROED_BYTES = 2**26
#: Keyword arguments that say where a result is made, which is on the processor here.
_PLACES = {"device", "pin_memory", "non_blocking"}


@dataclass(frozen=True)
class Run:
    """A kernel that ran on zeros.

    Attributes:
        args: Its arguments.
        plain: The plain tensors of its original arguments, each with the storage that stood for it.
        result: Its result.
        extra_bytes: Its peak memory beyond its result; None if it was not measured.
    """

    args: tuple[Any, ...]
    plain: list[tuple[torch.Tensor, weakref.ref[torch.UntypedStorage]]]
    result: Any
    extra_bytes: int | None


def run(func: Any, args: Any, kwargs: Any) -> Run:
    """Runs an operator on tensors of the same shapes and patterns, twice: the first time, libraries are initialized.

    Args:
        func: The operator.
        args: Its arguments; sparse ones, fake or with data, among them.
        kwargs: Its keyword arguments.

    Returns:
        Its second run.

    Raises:
        Exception: What the operator raises in a real run, such as for sparse tensors that it does not support.
    """
    kwargs = {name: value for name, value in kwargs.items() if name not in _PLACES}
    outcome: list[Any] = []
    is_written = func._schema.is_mutable

    def measure() -> None:
        torch.set_grad_enabled(False)  # of this thread
        try:
            func(*_real(args, is_written), **_real(kwargs, is_written))
            given, by_name = _real(args, is_written), _real(kwargs, is_written)
            plain = list(_plain(args, given))
            with short_session() as session:
                is_measured = session.start(_profiler.RecordScope.LITE_INTERPRETER, profile_memory=True)
                result = func(*given, **by_name)
                events = in_time(allocations(session.stop())) if is_measured else []
            highest, total = highest_of(events)
            outcome.append(Run(given, plain, result, highest - total if is_measured else None))
        except Exception as error:  # noqa: BLE001 - raised below, in the job's own thread
            outcome.append(error)

    thread = threading.Thread(target=measure, name="memprof-sparse-kernels")
    thread.start()
    thread.join()
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    done: Run = outcome[0]
    return done


def bytes_of(values: Any) -> int:
    """Returns the bytes of an operator's arguments; of sparse ones, those of their indices and values."""
    tensors = tensors_in(values)
    return sum(part.nbytes for each in tensors for part in (parts_of(each) if is_sparse(each) else (each,)))


def _plain(given: Any, real: Any) -> Iterator[tuple[torch.Tensor, weakref.ref[torch.UntypedStorage]]]:
    """Yields the plain tensors of arguments, each with the storage that stands for it, which may be freed."""
    for one, other in zip(given, real, strict=True):
        if isinstance(one, _LISTS):
            yield from _plain(one, other)
        elif is_sparse(one):
            yield from _plain(parts_of(one), parts_of(other))
        elif isinstance(one, torch.Tensor):
            yield one, weakref.ref(other.untyped_storage())


def _real(value: Any, is_written: bool) -> Any:
    """Returns arguments as tensors with data; of an operator that writes to them, as tensors of its own."""
    if is_sparse(value):
        return _real_sparse(value, is_written)
    if isinstance(value, torch.Tensor):
        values = known(value) if isinstance(value, FakeTensor) else value.detach()
        if values is None:
            return _zeros(value)
        return internal(values.clone()) if is_written else values
    if isinstance(value, dict):
        return {name: _real(item, is_written) for name, item in value.items()}
    return type(value)(_real(item, is_written) for item in value) if type(value) in _LISTS else value


def _real_sparse(tensor: torch.Tensor, is_written: bool) -> torch.Tensor:
    pattern, values = pattern_of(tensor), _zeros(parts_of(tensor)[-1])
    indices = pattern.indices
    if is_written:
        indices = tuple(internal(each.clone()) for each in indices)
    sizes, is_coo = tuple(tensor.shape), tensor.layout is torch.sparse_coo
    settings: dict[str, Any] = {"is_coalesced": pattern.is_coalesced} if is_coo else {"layout": tensor.layout}
    create: Any = torch.sparse_coo_tensor if is_coo else torch.sparse_compressed_tensor
    made: torch.Tensor = create(*indices, values, sizes, check_invariants=False, **settings)
    return made


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    create: Callable[..., torch.Tensor] = torch.zeros if size * tensor.element_size() <= _ZEROED_BYTES else torch.empty
    made = create((size,), dtype=tensor.dtype)
    return made.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Results:
    """Turns a kernel's results into fake tensors that share memory with its arguments where the real ones do."""

    def __init__(self, mode: FakeTensorMode, func: Any, device: torch.device, given: Any, run: Run) -> None:
        """Pairs an operator's arguments with those of its kernel."""
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
