"""How many elements of a tensor without values can differ from zero, and what indexing with them takes.

A mask is often made of zeros by writing ones at random places: what reads it has as many rows as there were places,
not as the mask has elements. So the elements that can differ from zero are counted in tensors made in this way, in
dense copies of sparse tensors, and in masks where a job has written as many values.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.calls.read_values import MASKS, kept_elements
from memprof.recorder.calls.torch_state import packets
from memprof.trace.operator_facts import DISJUNCTIONS, DUPLICATES, ZEROS
from memprof.virtual.values.known import known

_aten = torch.ops.aten
#: Attribute of a fake storage: the most elements that differ from zero, and the version of its tensors by then.
_MARKED = "_memprof_marked"
_ZEROS = packets(ZEROS)
#: Scatters in place; the others return a new tensor.
_SCATTERS = {_aten.scatter_: True, _aten.index_fill_: True, _aten.scatter: False, _aten.index_fill: False}
#: Operators whose result is zero where their first argument is.
_KEEPS_ZEROS = packets(DUPLICATES) | packets("div mul")
#: Comparisons with a number that zero does not meet.
_COMPARISONS = {
    _aten.eq: lambda number: number != 0,
    _aten.ne: lambda number: number == 0,
    _aten.gt: lambda number: number >= 0,
    _aten.lt: lambda number: number <= 0,
    _aten.ge: lambda number: number > 0,
    _aten.le: lambda number: number < 0,
}
#: Writes at the places of index tensors; in place or not.
_PUTS = {_aten.index_put_: True, _aten.index_put: False}
_OR = packets(DISJUNCTIONS)
_FOLLOWED = {*_ZEROS, *_SCATTERS, *_PUTS, *_OR, *_KEEPS_ZEROS, *_COMPARISONS, _aten.cat}
_POSITION_BYTES = 8
_INDEX_PUTS = packets("index_put index_put_ _index_put_impl_")
#: Elements from which a kernel uses several threads (at::internal::GRAIN_SIZE).
_GRAIN = 32_768


def most_marked(tensor: Any) -> int | None:
    """Returns the most elements of a tensor that differ from zero; None where that is not known."""
    if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided or tensor.is_inference():
        return None
    kept: tuple[int, int] | None = getattr(tensor.untyped_storage(), _MARKED, None)
    if kept is None or kept[1] != tensor._version:
        return None
    # An expanded tensor has each of its storage's elements several times.
    return None if 0 in tensor.stride() and tensor.numel() > 1 else min(kept[0], tensor.numel())


def follow_marks(func: Any, args: Any, result: Any) -> None:
    """Notes how many elements of an operator's result can differ from zero."""
    packet = getattr(func, "overloadpacket", None)
    if packet not in _FOLLOWED or not isinstance(result, FakeTensor) or result.is_inference():
        return
    if packet in _ZEROS:
        mark(result, 0)
    elif packet in _SCATTERS:
        # scatter(self, dim, index, ...) and index_fill(self, dim, index, value): places of one row, in each row.
        before = most_marked(args[0])
        if before is None or len(args) < 4:
            return
        index = args[2]
        places = index.numel()
        if packet in (_aten.index_fill, _aten.index_fill_):
            places *= args[0].numel() // max(args[0].shape[args[1]] if args[0].dim() else 1, 1)
        mark(result, before + places, rises=_SCATTERS[packet])
    elif packet in _PUTS:
        _mark_as_written(args[0], args[1], args[2])
        before = most_marked(args[0])
        if before is not None:
            mark(result, min(before + _places_of(args[0], args[1]), result.numel()), rises=_PUTS[packet])
    elif packet is _aten.cat or packet in _OR:
        parts = args[0] if packet is _aten.cat else args
        # A smaller argument of a disjunction is repeated.
        is_repeated = packet in _OR and any(getattr(part, "shape", None) != result.shape for part in parts)
        counts = [most_marked(part) for part in parts]
        if not is_repeated and any(count is not None for count in counts):
            full = [part.numel() if count is None else count for part, count in zip(parts, counts, strict=True)]
            mark(result, min(sum(full), result.numel()))
    elif packet is _aten.eq and _is_one_hot(args):
        mark(result, args[0].numel())
    elif packet in _KEEPS_ZEROS or _is_met_by_few(packet, args):
        before = most_marked(args[0])
        if before is not None and args[0].shape == result.shape:
            mark(result, before)


def _mark_as_written(tensor: FakeTensor, indices: Any, values: Any) -> None:
    """Notes how many elements of a mask are true, which the values that are written there have as a size."""
    masks = [index for index in indices if index is not None and index.dtype in MASKS]
    if len(masks) != 1 or indices[-1] is not masks[0] or sum(index is not None for index in indices) != 1:
        return
    (mask,) = masks
    # Dimensions of the values are aligned from the last one; one of size 1 may stand for any number.
    place = tensor.dim() - (len(indices) - 1) - mask.dim()
    count = values.shape[-1 - place] if values.dim() > place else 1
    is_whole = isinstance(mask, FakeTensor) and mask.numel() * mask.element_size() == mask.untyped_storage().nbytes()
    if count != 1 and is_whole and known(mask) is None:
        mark(mask, count)


def _places_of(tensor: Any, indices: Any) -> int:
    """Returns how many elements of a tensor are written to at index tensors, at most."""
    shapes = [
        torch.Size([most_true(index)]) if index.dtype in MASKS else index.shape
        for index in indices
        if index is not None
    ]
    # The bound of a mask need not match the other indices, as its real number of places does.
    sizes = itertools.zip_longest(*map(reversed, shapes), fillvalue=1)
    places: int = math.prod(map(max, sizes))
    return places * kept_elements(tensor, indices)


def _is_met_by_few(packet: Any, args: Any) -> bool:
    test = _COMPARISONS.get(packet)
    return test is not None and isinstance(args[1], (bool, int, float)) and test(args[1])


def _is_one_hot(args: Any) -> bool:
    """Whether each row of a tensor of one column is compared with different numbers, as torch.one_hot does."""
    places, classes = args[0], known(args[1])
    if not isinstance(places, FakeTensor) or places.dim() == 0 or places.shape[-1] != 1 or classes is None:
        return False
    return classes.dim() == 1 and len(set(classes.tolist())) == len(classes)


def mark(tensor: FakeTensor, count: int, *, rises: bool = False) -> None:
    """Notes how many elements of a tensor can differ from zero.

    Args:
        tensor: The tensor.
        count: That number.
        rises: Whether it is being written to: torch raises its version after the operator.
    """
    if tensor.layout is torch.strided and not tensor.is_inference():  # those have no versions
        setattr(tensor.untyped_storage(), _MARKED, (count, tensor._version + rises))


def most_true(mask: torch.Tensor) -> int:
    """Returns how many elements of a mask are true, at most."""
    values, most = known(mask), most_marked(mask)
    return int(values.count_nonzero()) if values is not None else mask.numel() if most is None else most


def position_bytes(func: Any, args: Any, result: Any) -> int:
    """Returns the peak bytes beyond its result of an operator that indexes.

    Source: ``expandTensors`` in aten/src/ATen/native/IndexingUtils.h and ``masked_select_out_impl_cpu`` in
    TensorAdvancedIndexing.cpp.
    """
    packet = getattr(func, "overloadpacket", None)
    if packet is _aten.index or packet in _INDEX_PUTS:
        is_fill = packet in _INDEX_PUTS and args[2].numel() == 1 and not any(args[3:4])
        return 0 if is_fill and _is_one_mask(args[1]) else sum(map(_of_index, args[1]))
    return _of_selection(args[0], args[1], result) if func is _aten.masked_select.default else 0


def _is_one_mask(indices: Any) -> bool:
    """Whether a number is written where a mask is true, without positions."""
    given = [index for index in indices if index is not None]
    return len(given) == 1 and given[0].dtype in MASKS


def _of_index(index: torch.Tensor | None) -> int:
    """A mask is replaced by the positions in each of its dimensions, and int32 by int64."""
    if index is None or index.device.type != "cpu":
        return 0
    if index.dtype in MASKS:
        return most_true(index) * index.dim() * _POSITION_BYTES
    return index.numel() * _POSITION_BYTES if index.dtype is torch.int32 else 0


def _of_selection(tensor: torch.Tensor, mask: torch.Tensor, result: torch.Tensor) -> int:
    """The mask is counted in int64 before there is a result; threads also need it and its running sum in int64."""
    tensor, mask = torch.broadcast_tensors(tensor, mask)  # type: ignore[no-untyped-call]
    is_serial = torch.get_num_threads() == 1 or mask.numel() < _GRAIN
    if is_serial and tensor.is_contiguous() and mask.is_contiguous():
        return max((mask.numel() + 1) * _POSITION_BYTES - result.nbytes, 0)
    return 2 * mask.numel() * _POSITION_BYTES
