"""Runs the operators of a dry run that read or make sparse tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memprof.recorder.calls.dispatch_modes import tensors_in
from memprof.recorder.memory.tensor_memory import parts_of
from memprof.units import format_bytes
from memprof.virtual.tensors import sparse_kernels
from memprof.virtual.tensors.fakes import (
    Pattern,
    count_places,
    is_sparse,
    make,
    part,
    pattern_of,
    share,
    spread_pattern,
    values_of,
)
from memprof.virtual.tensors.sparse_kernels import Results
from memprof.virtual.values.nonzeros import mark

if TYPE_CHECKING:
    from memprof.virtual.values.answers import Answers

_aten = torch.ops.aten
_COO = _aten._sparse_coo_tensor_with_dims_and_tensors.default
_COMPRESSED = _aten.sparse_compressed_tensor.comp_plain_value_size
#: Operators that make sparse tensors of plain ones.
_MAKES = {_COO, _COMPRESSED, _aten.sparse_compressed_tensor.comp_plain_value, _aten.sparse_coo_tensor.size}


_MAKES |= {_aten._sparse_coo_tensor_with_dims.default}
#: Makes one where its tenth argument says so.
_BAG_BACKWARD, _IS_SPARSE = _aten._embedding_bag_backward.default, 9
_TO_DENSE = _aten._to_dense.default
_ALIASES = {_aten.detach.default, _aten.alias.default}
#: Operators that return a part, and its place.
_PARTS = {
    _aten._indices.default: 0,
    _aten.indices.default: 0,
    _aten.crow_indices.default: 0,
    _aten.ccol_indices.default: 0,
    _aten.col_indices.default: 1,
    _aten.row_indices.default: 1,
    _aten._values.default: -1,
    _aten.values.default: -1,
}
#: Answered by torch from a tensor's sizes.
_QUERIES = {_aten._nnz.default, _aten.sparse_dim.default, _aten.dense_dim.default}
_SMALL = {*_QUERIES, _aten.is_coalesced.default}
#: Products of a sparse matrix with a plain one, and the places of both.
_PRODUCTS = {
    _aten.mm.default: (0, 1),
    _aten._sparse_addmm.default: (1, 2),
    _aten.addmm.default: (1, 2),
}
#: Operators that read few rows of their first, plain argument.
_READS_ROWS = {_aten.add_.Tensor, _aten.sparse_mask.default}
#: Operators on more bytes are not run: a dry run must not use the memory and time that it is meant to save.
_MOST_BYTES = 2**31


class SparseOperators:
    """Results of sparse operators: the processor's kernels run on zeros at the real places, where these are known.

    How many elements a result has then follows from them, as in a real run. Where they are not known, as many places
    differ as possible, which the notes say.
    """

    def __init__(self, answers: Answers, refuse: Callable[[str], NoReturn], *, is_on_device: bool) -> None:
        """Starts with no operator run.

        Args:
            answers: Counts sizes that are upper bounds.
            refuse: Ends the job with a message.
            is_on_device: Whether the job runs on a virtual device, whose kernels allocate otherwise.
        """
        self._answers = answers
        self._refuse = refuse
        self._is_on_device = is_on_device
        self._measured: dict[Any, int | None] = {}
        self._untried: Counter[str] = Counter()

    @staticmethod
    def are_needed(func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an operator reads or makes a sparse tensor."""
        if func is _BAG_BACKWARD:
            return bool(args[_IS_SPARSE])
        return func in _MAKES or _has_sparse(args) or _has_sparse(kwargs)

    def temporary_bytes(self, func: Any, args: Any, kwargs: Any) -> int:
        """Returns the peak memory beyond its result that an operator on sparse tensors with data takes, in bytes."""
        if func in _SMALL or func in _PARTS or func in _ALIASES or not self.are_needed(func, args, kwargs):
            return 0
        return self._measured_bytes(func, args, kwargs)

    def run(self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> tuple[Any, int]:
        """Runs an operator.

        Returns:
            Its result, and its kernel's peak memory beyond it on the processor, in bytes.
        """
        if func is _aten.is_coalesced.default:
            return pattern_of(args[0]).is_coalesced, 0
        if func in _QUERIES:
            return FakeTensorMode.__torch_dispatch__(mode, func, (), args, kwargs), 0
        if func in _PARTS:
            with mode:
                return part(args[0], _PARTS[func]), 0
        device = _device_of(args, kwargs)
        if func in _ALIASES or (self._is_on_device and func is _aten.clone.default and _is_stored_as_gradient()):
            source = args[0]
            return make(mode, source.layout, tuple(source.shape), parts_of(source), pattern_of(source), device), 0
        if func in (_COO, _COMPRESSED):
            return self._made_of(mode, func, args, kwargs, device), 0
        product = self._product(mode, func, args, kwargs)
        if product is not None:
            return product
        if func is _TO_DENSE and args[0].numel() * args[0].element_size() > _MOST_BYTES:
            return self._large_dense(mode, *args, **kwargs), 0
        few = args[1:] if func in _READS_ROWS and not is_sparse(args[0]) else args
        if sparse_kernels.bytes_of(few) > _MOST_BYTES:
            self._refuse(
                f"{func} cannot be dry-run: its sparse tensors are larger than {format_bytes(_MOST_BYTES)}. Record a "
                "real run of it, or leave the operator out of the dry run."
            )
        run = sparse_kernels.run(func, args, kwargs)
        results = Results(mode, func, device, args, run)
        result = results.of(run.result)
        if func is _BAG_BACKWARD and values_of(args[1]) is None:
            share(result, parts_of(result), spread_pattern((result.shape[0],), args[1].numel()))
        if is_sparse(result) and not pattern_of(result).is_certain and func is _aten._coalesce.default:
            self._answers.count_bound(func)
        if func is _TO_DENSE:
            _mark_dense(args[0], result)
        if run.extra_bytes is None:
            self._untried[str(func)] += 1
        return result, run.extra_bytes or 0

    def notes(self) -> list[str]:
        """Returns notes naming the operators whose memory could not be measured."""
        if not self._untried:
            return []
        names = ", ".join(f"{name} ({count:,})" for name, count in self._untried.most_common())
        return [f"temporary memory of these operators on sparse tensors could not be measured: {names}"]

    def _made_of(self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any, device: torch.device) -> FakeTensor:
        """Makes a sparse tensor of its parts, which it shares."""
        if func is _COO:
            sparse_dim, _, size, *parts = args
            is_unique = bool(kwargs.get("is_coalesced"))
        else:
            *parts, size = args
            sparse_dim, is_unique = 2, True
        values = [values_of(each) for each in parts[:-1]]
        certain = tuple(each for each in values if each is not None)
        if len(certain) == len(values):
            pattern = Pattern(certain, is_coalesced=is_unique)
        elif func is _COO:
            pattern = spread_pattern(tuple(size[:sparse_dim]), parts[0].shape[1], is_coalesced=is_unique)
        else:
            self._refuse(
                f"{func} cannot be dry-run: where the elements of a compressed tensor are is not known. Make it of "
                "tensors with data."
            )
        return make(
            mode, torch.sparse_coo if func is _COO else kwargs["layout"], tuple(size), tuple(parts), pattern, device
        )

    def _product(self, mode: FakeTensorMode, func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, int] | None:
        """Returns a product with a plain matrix, measured once for equal arguments; None for other operators."""
        places = _PRODUCTS.get(func)
        if places is None:
            return None
        left, right = (args[place] for place in places)
        if not is_sparse(left) or is_sparse(right) or not _fit(left, right):
            return None  # of those that do not fit, the kernel raises torch's own error
        extra_bytes = 0 if self._is_on_device else self._measured_bytes(func, args, kwargs)
        with mode:
            made = torch.empty((left.shape[0], right.shape[1]), dtype=right.dtype, device=right.device)
        return made, extra_bytes

    def _large_dense(
        self, mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype | None = None, **_: Any
    ) -> FakeTensor:
        """Returns a dense copy that is too large to be computed here; temporary memory of its kernel is not counted."""
        with mode:
            made: Any = torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)
        _mark_dense(tensor, made)
        if not self._is_on_device:
            self._untried[str(_TO_DENSE)] += 1
        return cast(FakeTensor, made)

    def _measured_bytes(self, func: Any, args: Any, kwargs: Any) -> int:
        """Returns a kernel's peak memory beyond its result, measured once for arguments of the same shapes."""
        key = (func, _key(args), _key(tuple(kwargs.items())))
        if key not in self._measured:
            is_small = sparse_kernels.bytes_of(args) <= _MOST_BYTES
            self._measured[key] = sparse_kernels.run(func, args, kwargs).extra_bytes if is_small else None
        found = self._measured[key]
        if found is None:
            self._untried[str(func)] += 1
        return found or 0


def _key(value: Any) -> Any:
    """Returns what identifies arguments, as far as a kernel's memory depends on them."""
    if isinstance(value, torch.Tensor):
        plain = tuple((part.shape, part.stride(), part.dtype) for part in parts_of(value) or (value,))
        return plain, value.shape, value.layout, is_sparse(value) and pattern_of(value).is_coalesced
    return tuple(map(_key, value)) if isinstance(value, (list, tuple)) else repr(value)


def _mark_dense(tensor: torch.Tensor, dense: FakeTensor) -> None:
    """Notes how many elements of a sparse tensor's dense copy can differ from zero."""
    if tensor.layout is torch.sparse_coo:
        mark(dense, count_places(tensor) * parts_of(tensor)[-1].shape[1:].numel())


def _fit(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are matrices of one type that can be multiplied."""
    return left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0] and left.dtype == right.dtype


def _has_sparse(values: Any) -> bool:
    return any(map(is_sparse, tensors_in(values)))


def _device_of(args: Any, kwargs: Any) -> torch.device:
    """Returns the device of an operator's result."""
    device = kwargs.get("device")
    if device is not None:
        return torch.device(device)
    return next((tensor.device for tensor in tensors_in(args)), torch.device("cpu"))


def _is_stored_as_gradient() -> bool:
    """Whether autograd stores a gradient, which it takes over unless a dispatch mode holds it, too.

    Source: torch/csrc/autograd/functions/accumulate_grad.h.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    node: Any = torch._C._current_autograd_node()
    return node is not None and node.name().endswith("AccumulateGrad")
