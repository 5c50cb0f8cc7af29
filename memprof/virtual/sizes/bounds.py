"""Upper bounds on results, for operators whose result size depends on values.

Operators of other libraries declare a size that depends on values in the function registered as their fake kernel;
where it states the largest size, that is the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.fake_impl import set_ctx_getter
from torch._library.simple_registry import singleton

from memprof.recorder.calls.read_values import MASKS
from memprof.virtual.values.known import known
from memprof.virtual.values.nonzeros import most_marked, most_true

_aten = torch.ops.aten


def upper_bound(func: Any, args: Any, kwargs: Any, rows: int | None = None) -> Any:
    """Returns an operator's largest possible result; None if no bound is known.

    Args:
        func: The operator.
        args: Its arguments; tensors have no values.
        kwargs: Its keyword arguments.
        rows: The rows that the result had in a recording; None where it has none, and for operators without `is_read`.
    """
    if rows is not None and func is _aten.index.Tensor:
        return _index(args[0], args[1], rows=rows)
    if rows is not None and func is _aten.repeat_interleave.Tensor:
        return _places(args[0], (rows,))
    if rows is not None and func is _aten.bincount.default:
        kwargs = {"weights": args[1] if len(args) > 1 else None, **kwargs, "minlength": rows}
        return _bincount(args[0], **kwargs)
    bound = _BOUNDS.get(func) or _OTHERS.get(func.name())
    largest = _declared(func, args, kwargs) if bound is None else bound(*args, **kwargs)
    if rows is None or isinstance(largest, torch.Tensor):
        return largest if rows is None else _with_rows(largest, 0, rows)
    dim = args[1] if func is _aten.unique_dim.default else args[3] if len(args) > 3 and args[3] is not None else 0
    values, inverse, counts = largest
    return _with_rows(values, dim, rows), inverse, _with_rows(counts, 0, rows) if counts.numel() else counts


def is_exact(func: Any, args: Any) -> bool:
    """Whether the bound is the size itself: the values of all masks are known."""
    if func is _aten.masked_select.default:
        return known(args[1]) is not None
    if func is _aten.linalg_lstsq.default:
        return bool(args[0].shape[-2] <= args[0].shape[-1])  # else there are residuals, if the matrices have full rank
    if func is _aten.bincount.default:
        return True  # its bound is the number of classes that the job gives
    if func is not _aten.index.Tensor:
        return False
    return all(known(index) is not None for index in args[1] if index is not None and index.dtype in MASKS)


def is_by_bytes(func: Any, args: Any) -> bool:
    """Whether an operator indexes with a mask of uint8, as scripts did before torch had bool."""
    if func is not _aten.index.Tensor:
        return False
    return any(index is not None and index.dtype is torch.uint8 for index in args[1])


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    # Column-major, like the result of torch's own kernel.
    most = most_marked(tensor)
    count = tensor.numel() if most is None else most
    return torch.empty((tensor.dim(), count), dtype=torch.int64, device=tensor.device).t()


def _with_rows(tensor: torch.Tensor, dim: int, rows: int) -> torch.Tensor:
    """Returns a tensor like another with a number of rows, in the same order of memory."""
    shape = [*tensor.shape[:dim], rows, *tensor.shape[dim:][1:]]
    return tensor.new_empty(shape) if tensor.is_contiguous() else tensor.new_empty(shape[::-1]).t()


def _masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    shape: torch.Size = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
    # Each element of a mask that is smaller stands for as many of the result.
    count = most_true(mask) * (shape.numel() // max(mask.numel(), 1))
    return torch.empty((count,), dtype=tensor.dtype, device=tensor.device)


def _index(tensor: torch.Tensor, indices: Any, rows: int | None = None) -> Any:
    """Indexes with masks; where neither values nor rows are known, as if all their elements were true."""
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in MASKS:
            place = torch.empty((most_true(index) if rows is None else rows,), dtype=torch.int64, device=index.device)
            positions += [place] * index.dim()
        else:
            positions.append(index)
    return _aten.index.Tensor(tensor, positions)


def _places(tensor: torch.Tensor, shape: Any) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device=tensor.device)


def _unique(tensor: torch.Tensor, *, has_inverse: bool, has_counts: bool) -> tuple[torch.Tensor, ...]:
    """Values that all differ, with their places and counts if asked for."""
    values = torch.empty((tensor.numel(),), dtype=tensor.dtype, device=tensor.device)
    inverse = _places(tensor, tensor.shape if has_inverse else (0,))
    return values, inverse, _places(tensor, (tensor.numel() if has_counts else 0,))


def _unique2(
    tensor: torch.Tensor, _is_sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[torch.Tensor, ...]:
    return _unique(tensor, has_inverse=return_inverse or return_counts, has_counts=return_counts)


def _unique_dim(tensor: torch.Tensor, dim: int, *_: bool) -> tuple[torch.Tensor, ...]:
    values = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return values, _places(tensor, (tensor.shape[dim],)), _places(tensor, (tensor.shape[dim],))


def _unique_consecutive(
    tensor: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[torch.Tensor, ...]:
    if dim is not None:
        return _unique_dim(tensor, dim)
    return _unique(tensor, has_inverse=return_inverse, has_counts=return_counts)


def _least_squares(
    left: torch.Tensor, right: torch.Tensor, _tolerance: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, ...]:
    """Matrices of full rank; solutions are the first rows of what the solver overwrites, which is column-major."""
    driver = driver or ("gelsy" if left.device.type == "cpu" else "gels")
    high, wide = left.shape[-2:]
    is_vector = right.dim() == left.dim() - 1 or right.dim() == 1
    columns = 1 if is_vector else right.shape[-1]
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[: -1 if is_vector else -2])  # type: ignore[no-untyped-call]
    rows = max(high, wide)
    solution = left.new_empty((*batch, columns, rows)).mT[..., :wide, :]
    has_residuals = high > wide and driver != "gelsy"
    residuals = left.new_empty((*batch, columns) if has_residuals else (0,))
    rank = left.new_empty((0,) if driver == "gels" else batch, dtype=torch.int64)
    has_values = driver in ("gelsd", "gelss")
    values = left.new_empty((*batch, min(high, wide)) if has_values else (0,), dtype=left.real.dtype)
    return solution[..., 0] if is_vector else solution, residuals, rank, values


def _bincount(tensor: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> torch.Tensor | None:
    """Counts of as many classes as are given."""
    kind = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return torch.empty((minlength,), dtype=kind, device=tensor.device) if minlength else None


def _kept_boxes(boxes: torch.Tensor, _scores: torch.Tensor, _threshold: float) -> torch.Tensor:
    """Non-maximum suppression that keeps all boxes."""
    return _places(boxes, (boxes.shape[0],))


class _Largest:
    """Stands in for the context of a fake kernel: sizes that depend on values are the largest that it declares."""

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> int:  # noqa: A002 - torch's names
        """Returns the largest size.

        Raises:
            _NoLargestError: None is declared.
        """
        if max is None:
            raise _NoLargestError
        return max

    create_unbacked_symint = new_dynamic_size


class _NoLargestError(Exception):
    """A fake kernel declares no largest size."""


def _declared(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the largest result that an operator's registered fake kernel declares; None if it declares none."""
    kernel = singleton.find(func.name()).fake_impl.kernel
    if kernel is None:
        return None
    try:
        with set_ctx_getter(_Largest):
            return kernel(*args, **kwargs)
    except _NoLargestError:
        return None


#: By the names of operators that other libraries define.
_OTHERS: dict[str, Callable[..., Any]] = {"torchvision::nms": _kept_boxes, "torchvision::qnms": _kept_boxes}
_BOUNDS: dict[Any, Callable[..., Any]] = {
    _aten.bincount.default: _bincount,
    _aten.nonzero.default: _nonzero,
    _aten.masked_select.default: _masked_select,
    _aten.index.Tensor: _index,
    _aten._unique2.default: _unique2,
    _aten.unique_dim.default: _unique_dim,
    _aten.unique_consecutive.default: _unique_consecutive,
    _aten.linalg_lstsq.default: _least_squares,
}
