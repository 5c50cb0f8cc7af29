"""Runs the processor's kernels of sparse tensors on zeros: their results' places and sizes, and their memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import _profiler
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.dry.spans import internal
from memprof.recorder.dry.sparse.fakes import is_sparse, pattern_of
from memprof.recorder.dry.values.known import known
from memprof.recorder.memory.parts import parts_of
from memprof.recorder.profiler.native import allocations, highest_of
from memprof.recorder.profiler.sessions import short_session

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
                events = allocations(session.stop()) if is_measured else []
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
    if is_sparse(values):
        return sum(part.nbytes for part in parts_of(values))
    if isinstance(values, torch.Tensor):
        return values.nbytes
    return sum(map(bytes_of, values)) if isinstance(values, _LISTS) else 0


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
