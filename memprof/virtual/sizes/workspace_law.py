"""Predicts the workspace of a large operator from measurements at three smaller batches, if these lie on a line."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from memprof.recorder.calls.dispatch_modes import tensors_in

_aten = torch.ops.aten
LISTS = (list, tuple)
#: The dimension that grows in each matrix of a product, by its place among the arguments: rows, inner, columns.
_PRODUCTS: dict[Any, tuple[dict[str, int], ...]] = {
    _aten.mm: ({"self": 0}, {"self": 1, "mat2": 0}, {"mat2": 1}),
    _aten.addmm: ({"self": -2, "mat1": 0}, {"mat1": 1, "mat2": 0}, {"self": -1, "mat2": 1}),
    _aten.bmm: ({"self": 0, "mat2": 0}, {"self": 1}, {"self": 2, "mat2": 1}, {"mat2": 2}),
}
#: Parts of the names of arguments that are the same at any batch.
_OF_MODEL = ("weight", "bias", "running_", "save_")
#: Operators whose arguments are not all divided by their first dimension.
_UNDIVIDED = {_aten._cdist_backward, _aten.mkldnn_rnn_layer, _aten.mkldnn_rnn_layer_backward}
#: Total bytes of the arguments of the largest of the three.
_MOST_BYTES = 16 * 2**20
#: Divisor of a product's largest dimension where its other matrices leave no room within _MOST_BYTES.
_MANY = 64
#: Largest deviation from a line: the rounding of a library's blocks.
_MOST_ERROR, _LEAST_BYTES = 0.002, 1024

#: What is measured: bytes beyond the result, and the shape, strides, type and storage bytes of each output.
Measured = tuple[int, list[Any]]


def extrapolate(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    outputs: Sequence[torch.Tensor],
    measure: Callable[[Any, Any, Any], Measured | None],
) -> Measured | None:
    """Returns what an operator takes, from three smaller batches; None if they cannot be made or are on no line."""
    named = dict(zip((one.name for one in func._schema.arguments), args, strict=False))
    dims, size = _grown_dims(func, named | kwargs)
    tensors = {name: value for name, value in (named | kwargs).items() if isinstance(value, torch.Tensor)}
    row_bytes = sum(_bytes_of(tensors[name]) for name in dims) / size if dims else 0.0
    fixed = sum(_bytes_of(tensor) for name, tensor in tensors.items() if name not in dims)
    least = min(size // 8, int((_MOST_BYTES - fixed) / row_bytes) // 4) if row_bytes else 0
    is_product = func.overloadpacket in _PRODUCTS
    if least < 1 and is_product and size >= _MANY:  # by another dimension, at each of three sizes of this one
        least, measure = size // _MANY, partial(_measured_product, measure)
    if least < 1:
        return None
    sizes, found = (least, 2 * least, 4 * least), []
    for few in sizes:
        fewer = {name: _resized(value, dims, name, size, few) for name, value in named.items()}
        by_name = {name: _resized(value, dims, name, size, few) for name, value in kwargs.items()}
        one = measure(func, list(fewer.values()), by_name)
        if one is None or len(one[1]) != len(outputs):
            return None
        found.append(one)
    extra = _on_line(sizes, [one[0] for one in found], size)
    if extra is None and is_product:  # the blocks of each thread, of which larger matrices need no more
        extra = max(one[0] for one in found)
    if extra is None:
        return None
    shapes = []
    for output, *made in zip(outputs, *(one[1] for one in found), strict=True):
        storage = _on_line(sizes, [one[3] for one in made], size)
        if storage is None:
            return None
        shapes.append((output.shape, _strides(made[-1], output.shape), made[-1][2], storage))
    return extra, shapes


def corrected(result: Any, shapes: list[Any], make: Callable[..., torch.Tensor]) -> Any:
    """Returns a result whose tensors have the kernel's sizes and strides."""
    if isinstance(result, torch.Tensor):
        return corrected([result], shapes, make)[0]
    if not isinstance(result, LISTS) or len(tensors_in(result)) != len(shapes):
        return result
    wanted = iter(shapes)
    items = []
    for item in result:
        if isinstance(item, torch.Tensor):
            items.append(_as_made(item, next(wanted), make))
        else:
            items.append(item)
    return result if all(map(operator.is_, result, items)) else items if isinstance(result, list) else tuple(items)


def _as_made(item: torch.Tensor, made: Any, make: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Returns a tensor with the kernel's layout and storage size."""
    shape, stride, dtype, storage_bytes = made
    if storage_bytes > item.untyped_storage().nbytes():
        return make((storage_bytes // dtype.itemsize,), (1,), dtype=dtype).as_strided(shape, stride)
    is_alike = (item.shape, item.stride(), item.dtype) == (shape, stride, dtype)
    return item if is_alike else make(shape, stride, dtype=dtype)


def _measured_product(measure: Callable[[Any, Any, Any], Measured | None], func: Any, args: Any, kwargs: Any) -> Any:
    """Returns what a product of matrices without data takes, by smaller ones where it is itself too large."""
    matrices = [value for value in args if isinstance(value, torch.Tensor)]
    if sum(map(_bytes_of, matrices)) <= _MOST_BYTES:
        return measure(func, args, kwargs)
    with torch._C._DisableTorchDispatch():
        result = func(*args, **kwargs)
    return extrapolate(func, args, kwargs, [result], measure)


def _grown_dims(func: Any, named: dict[str, Any]) -> tuple[dict[str, int], int]:
    """Returns the dimension of each argument that grows with the batch, and the size of that dimension."""
    packet = func.overloadpacket
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor) and value.dim()}
    if packet in _PRODUCTS:
        groups = [
            {name: dim for name, dim in group.items() if tensors[name].dim() >= abs(dim) and tensors[name].numel()}
            for group in _PRODUCTS[packet]
        ]
        size_of = {id(group): max(tensors[name].shape[dim] for name, dim in group.items()) for group in groups}
        best = max(groups, key=lambda group: size_of[id(group)])
        return {name: d for name, d in best.items() if tensors[name].shape[d] == size_of[id(best)]}, size_of[id(best)]
    batched = {name: value for name, value in tensors.items() if not any(part in name for part in _OF_MODEL)}
    if not batched or packet in _UNDIVIDED:
        return {}, 1
    most = max(value.dim() for value in batched.values())
    size = max(value.shape[0] for value in batched.values() if value.dim() == most)
    is_pointwise = torch.Tag.pointwise in func.tags  # of fewer dimensions: the last ones, repeated in every row
    grown = (name for name, value in batched.items() if value.shape[0] == size)
    return {name: 0 for name in grown if batched[name].dim() == most or not is_pointwise}, size


def _resized(value: Any, dims: dict[str, int], name: str, size: int, few: int) -> Any:
    """Returns an argument at a smaller batch, a tensor without data."""
    if name == "N":  # of normalization over groups
        return few
    if not isinstance(value, torch.Tensor):
        return value
    shape, stride = list(value.shape), value.stride()
    if name in dims:
        stride = _rescaled(stride, dims[name] % value.dim(), size, few)
        shape[dims[name]] = few
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")


def _rescaled(stride: Sequence[int], dim: int, size: int, new: int) -> tuple[int, ...]:
    """Returns the strides after one dimension has another size: those of the dimensions around it change with it."""
    least = stride[dim] * size
    return tuple(s * new // size if i != dim and least and s >= least else s for i, s in enumerate(stride))


def _strides(made: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns an output's strides at its full shape, from those at a smaller one."""
    stride: tuple[int, ...] = tuple(made[1])
    for dim, (few, size) in enumerate(zip(made[0], shape, strict=True)):
        if few != size:
            stride = _rescaled(stride, dim, few, size)
    return stride


def _on_line(sizes: Sequence[int], found: Sequence[int], size: int) -> int | None:
    """Returns the value at a size on the line through the first and last of three; None if the other is not on it."""
    slope = (found[2] - found[0]) / (sizes[2] - sizes[0])
    expected = found[0] + slope * (sizes[1] - sizes[0])
    if abs(found[1] - expected) > max(_LEAST_BYTES, _MOST_ERROR * abs(found[1])):
        return None
    return max(0, round(found[2] + slope * (size - sizes[2])))


def _bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
