"""Runs an operator for real, once and on zeros, to measure kernel memory that shapes do not determine."""

from __future__ import annotations

import mmap
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch._C import _profiler

from memprof.recorder.calls.dispatch_modes import map_tensors, tensors_in
from memprof.recorder.calls.torch_state import packets
from memprof.recorder.profiler.native import NativeEvents, allocations, highest_of, in_time
from memprof.recorder.profiler.profiler_guard import ProfilerGuard
from memprof.recorder.profiler.sessions import short_session
from memprof.trace.operator_facts import CPU_DECOMPOSITIONS, CPU_LOSSES, CPU_WORKSPACE, MATRIX_PRODUCTS, WRAPS_NUMBER
from memprof.virtual.sizes.workspace_law import LISTS, corrected, extrapolate

_aten = torch.ops.aten
#: Operators whose kernels use temporary memory, or whose result size is chosen by their library.
_TRIED = packets(CPU_WORKSPACE | CPU_LOSSES)
#: Products, which use temporary memory only in the shorter types, and for a matrix that BLAS cannot read in place.
_PRODUCTS = packets(MATRIX_PRODUCTS)
#: Sums, which cast what they add up to the type of the result: a mask of int32 to int64.
_SUMS = packets("sum cumsum prod")
_DECOMPOSITIONS = packets(CPU_DECOMPOSITIONS)
#: Matrices of more rows or columns are measured at these smaller sizes: their time is cubic, their memory quadratic.
_DECOMPOSED = (256, 192, 128)
_SHORT = (torch.bfloat16, torch.float16)
#: Libraries whose kernels on the processor are written in torch's operators: weights are unpacked inside.
_LIBRARIES = ("bitsandbytes", "torchao")
_WRAPPING = packets(WRAPS_NUMBER)
_NUMBERS = (bool, int, float, complex)
#: Operators on more bytes are measured at smaller batches: a dry run must not use the memory and time that it saves.
_MOST_BYTES = 128 * 2**20
#: Those that smaller batches do not determine are tried as they are, up to this; their arguments take no memory.
_MOST_WHOLE_BYTES = 2**30
#: Arguments of more bytes are mapped, so that their pages of zeros are one page; filling them takes time and memory.
_MAPPED_BYTES = 4 * 2**20


class Kernels:
    """Tries operators in a separate thread, free of the job's modes and sessions."""

    def __init__(self) -> None:
        """Starts with no operator tried."""
        self._found: dict[Any, tuple[int, list[Any]] | None] = {}
        self._untried: Counter[str] = Counter()
        self._is_available = NativeEvents.is_available()
        ProfilerGuard().install()  # operators are tried until the process ends

    def learn(
        self, func: Any, args: Any, kwargs: Any, result: Any, make: Callable[..., torch.Tensor]
    ) -> tuple[Any, int]:
        """Measures an operator's temporary memory, and corrects the size of its result.

        Args:
            func: The operator.
            args: Its arguments, fake tensors, or tensors with data only.
            kwargs: Its keyword arguments.
            result: Its result, a tensor of the same kind.
            make: Creates a fake tensor of a given size, strides and type.

        Returns:
            The result, and the kernel's peak bytes beyond it.
        """
        packet = getattr(func, "overloadpacket", None)
        if not self._is_available:
            return result, 0
        if packet in _WRAPPING and any(type(value) in _NUMBERS for value in args):
            return result, self._wrapped_bytes(func, args, kwargs)
        inputs = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        is_library = getattr(func, "namespace", "") in _LIBRARIES
        casts = (
            packet in _SUMS and isinstance(result, torch.Tensor) and any(one.dtype != result.dtype for one in inputs)
        )
        if not (
            packet in _TRIED
            or packet in _PRODUCTS
            or packet in _DECOMPOSITIONS
            or is_library
            or casts
            or (torch.Tag.pointwise in getattr(func, "tags", ()) and len({tensor.dtype for tensor in inputs}) > 1)
        ):
            return result, 0
        tensors = [*inputs, *tensors_in([result])]
        if any(tensor.device.type != "cpu" or tensor.layout is not torch.strided for tensor in tensors):
            return result, 0
        if packet in _PRODUCTS and not any(tensor.dtype in _SHORT or _is_copied(tensor) for tensor in tensors):
            return result, 0
        found = self._tried(func, args, kwargs, tensors, tensors_in(result if isinstance(result, LISTS) else [result]))
        if found is None:
            self._untried[str(func)] += 1
            return result, 0
        extra_bytes, shapes = found
        return corrected(result, shapes, make), extra_bytes

    def stand_in(self, func: Any, args: Any, kwargs: Any, make: Callable[..., torch.Tensor]) -> Any:
        """Returns the result of an operator's kernel on zeros, as a fake tensor; None if unavailable.

        Some rules for fake tensors support only a device's kernel, and reject inputs that the processor's accepts:
        that of ``_grouped_mm`` requires bfloat16, which mixtures of experts in float32 do not have.
        """
        schema = func._schema
        tensors = [*tensors_in(args), *tensors_in(tuple(kwargs.values()))]
        is_plain = all(tensor.device.type == "cpu" and tensor.layout is torch.strided for tensor in tensors)
        aliases = schema.is_mutable or any(returned.alias_info is not None for returned in schema.returns)
        if not self._is_available or not is_plain or aliases or len(schema.returns) != 1:
            return None
        found = self._tried(func, args, kwargs, tensors)
        if found is None or len(found[1]) != 1:
            return None
        shape, stride, dtype, _ = found[1][0]
        return make(shape, stride, dtype=dtype)

    def _tried(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor] = (),
    ) -> tuple[int, list[Any]] | None:
        """Returns the result of ``_try``, cached for equal arguments; None if their tensors are too large to try."""
        key = (func, _key(args), _key(tuple(kwargs.items())), torch.is_grad_enabled(), torch.get_num_threads())
        if key not in self._found:
            if func.overloadpacket in _DECOMPOSITIONS and max(map(_largest_side, tensors)) > _DECOMPOSED[0]:
                self._found[key] = _decomposed(func, args, kwargs, tensors, outputs)
                return self._found[key]
            total = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            found = extrapolate(func, args, kwargs, outputs, _try) if total > _MOST_BYTES and outputs else None
            if found is None and total <= _MOST_WHOLE_BYTES:
                found = _try(func, args, kwargs, is_first=total <= _MOST_BYTES)
            self._found[key] = found
        return self._found[key]

    def _wrapped_bytes(self, func: Any, args: Any, kwargs: Any) -> int:
        """Returns the bytes used to wrap a number, tried on tensors of two elements."""
        few = [torch.Size([2]) if isinstance(value, torch.Tensor) else type(value) for value in args]
        types = [value.dtype for value in tensors_in(args)]
        key = (func, tuple(few), tuple(types), repr(kwargs))
        if key not in self._found:
            self._found[key] = _try(func, [_two_of(value) for value in args], kwargs)
        found = self._found[key]
        return found[0] if found is not None else 0

    def notes(self) -> list[str]:
        """Returns notes naming the operators that were not tried."""
        if not self._untried:
            return []
        names = ", ".join(f"{name} ({count:,})" for name, count in self._untried.most_common())
        return [f"kernel workspaces of these operators could not be measured and are not counted: {names}"]


def _try(func: Any, args: Any, kwargs: Any, *, is_first: bool = True) -> tuple[int, list[Any]] | None:
    """Runs an operator on zeros.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Its keyword arguments.
        is_first: Run it once before it is measured: a library's first call includes its initialization.

    Returns:
        Its peak bytes beyond the result, and the shapes of its outputs; None if it raised, or no events were
        recorded.
    """
    outcome: list[tuple[int, list[Any]]] = []
    has_gradients = torch.is_grad_enabled()

    def run() -> None:
        # Libraries check whether gradients are enabled. Zeros that require none record nothing either way.
        with (
            torch.set_grad_enabled(has_gradients),
            suppress(RuntimeError),
        ):  # zeros are invalid arguments: no result
            real_args = map_tensors(_zeros, list(args))
            real_kwargs = map_tensors(_zeros, kwargs)
            if func is _aten.mkldnn_rnn_layer_backward.default:
                real_args[-1] = _rnn_workspace(real_args)
            if is_first:
                func(*real_args, **real_kwargs)
            measured = _measure(func, real_args, real_kwargs)
            if measured is not None:
                outcome.append(measured)

    thread = threading.Thread(target=run, name="memprof-kernels")
    thread.start()
    thread.join()
    return outcome[0] if outcome else None


def _largest_side(tensor: torch.Tensor) -> int:
    return max(tensor.shape[-2:], default=0)


def _decomposed(
    func: Any, args: Any, kwargs: Any, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> tuple[int, list[Any]] | None:
    """Returns the memory of a decomposition of large matrices: the parabola through that of three smaller ones."""
    largest = max(map(_largest_side, tensors))
    found = []
    for side in _DECOMPOSED:

        def smaller(tensor: torch.Tensor, share: float = side / largest) -> torch.Tensor:
            shape = [*tensor.shape[:-2], *(max(1, round(length * share)) for length in tensor.shape[-2:])]
            is_transposed = tensor.dim() > 1 and tensor.stride()[-2] == 1 != tensor.stride()[-1]
            with torch._C._DisableTorchDispatch():
                made = torch.zeros(shape[::-1] if is_transposed and len(shape) == 2 else shape, dtype=tensor.dtype)
                return made.T if is_transposed and len(shape) == 2 else made

        measured = _try(func, map_tensors(smaller, list(args)), map_tensors(smaller, kwargs))
        if measured is None:
            return None
        found.append(measured[0])
    sides = [float(side) for side in _DECOMPOSED]
    extra = 0.0
    for place, size in enumerate(found):  # Lagrange
        others = [side for number, side in enumerate(sides) if number != place]
        first, second = others
        extra += size * (largest - first) * (largest - second) / ((sides[place] - first) * (sides[place] - second))
    shapes = [(tensor.shape, tensor.stride(), tensor.dtype, 0) for tensor in outputs]
    return max(0, round(extra)), shapes


def _measure(func: Any, args: Any, kwargs: Any) -> tuple[int, list[Any]] | None:
    """Runs an operator and measures its memory; None if the job's own profiler is warming up or running."""
    with short_session() as session:
        if not session.start(_profiler.RecordScope.LITE_INTERPRETER, profile_memory=True):
            return None
        result = func(*args, **kwargs)
        highest, total = highest_of(in_time(allocations(session.stop())))
    outputs = result if isinstance(result, LISTS) else [result]
    shapes = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors_in(outputs)]
    if isinstance(result, torch.Tensor):
        # Its storage may be larger than the tensor.
        return highest - total, [(*shapes[0], result.untyped_storage().nbytes())]
    return highest - total, [(*shape, 0) for shape in shapes]


def _rnn_workspace(args: list[Any]) -> Any:
    """Returns the workspace that a layer's forward saves for backward: the library's own, not replaceable by zeros.

    Args:
        args: Arguments of ``mkldnn_rnn_layer_backward``.
    """
    reverse, mode, hidden_size, layers, has_biases, train, is_bidirectional, batch_sizes, is_batch_first = args[13:22]
    settings = (reverse, batch_sizes, mode, hidden_size, layers, has_biases, is_bidirectional, is_batch_first, train)
    with torch.enable_grad():
        return _aten.mkldnn_rnn_layer.default(*args[:7], *settings)[-1]


def _is_copied(tensor: torch.Tensor) -> bool:
    """Whether a product copies a matrix first: BLAS reads rows or columns that are contiguous and do not overlap.

    The gradient of a sum is such a matrix, one number expanded to all places.
    """
    if tensor.dim() < 2:
        return False
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    return not ((column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows)))


def _two_of(value: Any) -> Any:
    """Returns two zeros of a tensor's type, with data."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C._DisableTorchDispatch():
        return torch.zeros(2, dtype=value.dtype, device="cpu")


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    if size * tensor.element_size() < _MAPPED_BYTES:
        zeros = torch.zeros((size,), dtype=tensor.dtype)
    else:
        pages = mmap.mmap(-1, size * tensor.element_size(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        zeros = torch.frombuffer(pages, dtype=tensor.dtype, count=size)
    return zeros.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.storage_offset()
    if isinstance(value, LISTS):
        return tuple(_key(item) for item in value)
    return repr(value)
