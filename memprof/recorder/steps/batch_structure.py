"""What a batch consists of: tensors in tuples, lists, mappings, dataclasses, and batched graphs."""

from __future__ import annotations

import dataclasses
from collections import Counter, UserDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

#: What is not a sequence of samples although it is a sequence.
WHOLE = (str, bytes, torch.Size)
#: Types that can be looked at without running code of the job's.
_PLAIN = (str, bytes, int, float, bool, complex, torch.Size, torch.dtype, torch.device, type(None))


def is_record(value: Any) -> bool:
    """Whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(value: Any) -> dict[str, Any]:
    """Returns those fields of a dataclass that have been set."""
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if hasattr(value, each.name)}


def is_graphs(value: Any) -> bool:
    """Whether a value is a batch of graphs as torch_geometric makes them: one graph of parts without common edges."""
    kind = type(value)  # what an instance has might be computed
    return all(hasattr(kind, name) for name in ("num_graphs", "to_data_list", "from_data_list"))


def entries_of(value: Any) -> Iterable[Any]:
    """Returns what a container of tensors holds; nothing where it is none."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple)):
        return value
    if is_record(value):
        return fields_of(value).values()
    return value.to_dict().values() if is_graphs(value) else ()


def first_tensor(value: Any) -> torch.Tensor | None:
    """Returns a tensor by which a batch is known again: a list or tuple itself cannot be remembered weakly."""
    if isinstance(value, torch.Tensor):
        return value
    return next((found for entry in entries_of(value) if (found := first_tensor(entry)) is not None), None)


def batch_size(batch: Any, expected_size: int | None = None) -> int | None:
    """Returns how many samples a batch has, None where nothing tells.

    It is the first size of its tensors, of most of them where they differ. Where a loader says what to expect, a
    list of so many samples that cannot be stacked (images of any size) is a batch, too; and what is larger than
    expected is not.
    """
    if is_graphs(batch):
        return int(batch.num_graphs)
    tensors: list[torch.Tensor] = []
    lengths: list[int] = []
    if not collect(batch, tensors, lengths):
        return None
    first = Counter(tensor.shape[0] for tensor in tensors)
    if expected_size is not None and expected_size in first:
        return expected_size
    if expected_size is not None and expected_size in lengths:
        return expected_size
    if not first:
        return None
    size = first.most_common(1)[0][0]
    return size if size > 0 and (expected_size is None or size <= expected_size) else None


def collect(value: Any, tensors: list[torch.Tensor], lengths: list[int]) -> bool:
    """Lists the tensors and the lengths of sequences in a batch; False where it holds what cannot be split."""
    if isinstance(value, PackedSequence):
        return False  # its samples lie interleaved
    if is_graphs(value):
        lengths.append(value.num_graphs)
        return True
    if isinstance(value, torch.Tensor):
        if value.dim():
            tensors.append(value)
        return True
    if isinstance(value, Mapping):
        return all(collect(each, tensors, lengths) for each in value.values())
    if isinstance(value, (list, tuple)) and not isinstance(value, WHOLE):
        lengths.append(len(value))
        return all(collect(each, tensors, lengths) for each in value)
    if is_record(value):
        return all(collect(each, tensors, lengths) for each in fields_of(value).values())
    return True


def is_plain(value: Any) -> bool:
    """Whether a batch consists of types that can be looked at without running code of the job's."""
    if isinstance(value, UserDict):
        return is_plain(value.data)
    if type(value) is dict:
        return all(is_plain(each) for each in value.values())
    if is_graphs(value):
        return True
    if isinstance(value, PackedSequence) or type(value) in (torch.Tensor, torch.nn.Parameter) or type(value) in _PLAIN:
        return True
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(type(value), "_fields")):
        return all(is_plain(each) for each in value)
    return is_record(value) and all(is_plain(each) for each in fields_of(value).values())
