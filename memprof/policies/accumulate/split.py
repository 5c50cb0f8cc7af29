"""Splits a batch of any structure into micro-batches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from memprof.errors import PolicyError
from memprof.policies.accumulate.round import Round
from memprof.recorder.steps.batches import WHOLE, batch_size, collect, fields_of, is_graphs, is_record


@dataclass(frozen=True)
class Part:
    """One micro-batch.

    Attributes:
        batch: What the training loop sees, structured like the whole batch.
        number: Its index in the batch.
        count: Micro-batches in the batch.
        weight: Its share of the batch's samples.
    """

    batch: Any
    number: int
    count: int
    weight: float


def micro_batches(batch: Any, count: int) -> Iterator[Any]:
    """Splits a batch in a custom training loop.

    Put ``for part in memprof.micro_batches(batch, 4):`` around forward, backward and the update. Under accumulate, each
    part's gradients are weighted by its share of the samples and the update is deferred to the last part; otherwise
    this only splits. A part that a DataLoader yielded under accumulate is not split again.

    Args:
        batch: Tensors whose first dimension is the batch, also in tuples, lists, mappings and dataclasses, or a batch
            of graphs of torch_geometric.
        count: Maximum number of micro-batches.

    Yields:
        The parts, views of the batch.

    Raises:
        PolicyError: The batch has no tensor to split.
    """
    if count < 1:
        raise PolicyError(f"cannot split a batch into {count} micro-batches; the number must be positive.")
    rounds = Round.active()
    if any(each.count > 1 and each.is_handed(batch) for each in rounds):
        yield batch
        return
    parts = split_batch(batch, count)
    if parts is None:
        raise PolicyError(
            f"micro_batches cannot split a {type(batch).__name__}; "
            "pass tensors whose first dimension is the batch, in a tuple, list or dict."
        )
    for part in parts:
        for each in rounds:
            each.hand_out(part.batch, part.number, part.count, part.weight)
        yield part.batch


def split_batch(batch: Any, count: int, expected_size: int | None = None) -> list[Part] | None:
    """Splits a batch along its samples, into equal parts or with the first ones one sample larger.

    Args:
        batch: Tensors, also in tuples, lists, mappings, dataclasses and batched graphs.
        count: Number of parts; a batch with fewer samples has one part per sample.
        expected_size: Usual batch size, if known.

    Returns:
        The parts, views of the batch (of graphs: copies); None where its size cannot be determined.
    """
    size = batch_size(batch, expected_size)
    if size is None:
        return None
    count = min(count, size)
    # As in torch.tensor_split: the remainder goes to the first parts, so that no part is needlessly large.
    edges = [number * (size // count) + min(number, size % count) for number in range(count + 1)]
    return [
        Part(_taken(batch, size, start, stop), number, count, (stop - start) / size)
        for number, (start, stop) in enumerate(itertools.pairwise(edges))
    ]


def _taken(value: Any, size: int, start: int, stop: int) -> Any:
    """Takes some samples: of every tensor and sequence with one entry per sample; everything else is shared."""
    if isinstance(value, torch.Tensor):
        return value[start:stop] if value.dim() and value.shape[0] == size else value
    if is_graphs(value):
        return type(value).from_data_list(value.to_data_list()[start:stop]) if value.num_graphs == size else value
    if isinstance(value, Mapping):
        taken = {key: _taken(each, size, start, stop) for key, each in value.items()}
        if type(value) is dict:
            return taken
        clone: Any = copy.copy(value)  # keeps its type, such as a tokenizer's BatchEncoding
        clone.update(taken)
        return clone
    if isinstance(value, (list, tuple)) and not isinstance(value, WHOLE):
        if len(value) == size and not _holds_batches(value, size):
            return type(value)(value[start:stop])
        entries = [_taken(each, size, start, stop) for each in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if is_record(value):
        part = copy.copy(value)
        for name, each in fields_of(value).items():
            object.__setattr__(part, name, _taken(each, size, start, stop))  # works for frozen dataclasses too
        return part
    return value


def _holds_batches(value: Any, size: int) -> bool:
    """Whether a sequence holds tensors of a whole batch: (images, labels) with two samples each."""
    tensors: list[torch.Tensor] = []
    collect(value, tensors, [])
    return any(tensor.shape[0] == size for tensor in tensors)
