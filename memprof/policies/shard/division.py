"""How a model is divided over ranks: units that are gathered together, parts, buckets, time on a ring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from memprof.policies.plan.patterns import match_modules, outermost
from memprof.trace.schema import NONE, Bools, Ints, Storages
from memprof.trace.step import Step

_MIB = 1 << 20
#: Size of DDP's first bucket, for an early first send (torch.distributed._DEFAULT_FIRST_BUCKET_BYTES).
_FIRST_BUCKET_BYTES = _MIB
#: Index of the unit of everything outside the others.
ROOT = 0


def largest_parts(storages: Storages, ranks: int) -> Ints:
    """Returns the bytes of the largest rank's part of each storage: its first dimension divided, rounded up.

    These are requested bytes, before the allocator rounds.
    """
    texts, shape_of = np.unique(storages.shape.astype(str), return_inverse=True)
    first = np.array([int(text.partition("x")[0]) if text else 1 for text in texts])[shape_of]
    # A gradient may have been allocated in another shape, such as 1x64 for a bias; its parameter's shape applies.
    is_parameter, is_gradient = storages.category == "parameter", storages.category == "gradient"
    first_of = dict(zip(storages.name[is_parameter].tolist(), first[is_parameter].tolist(), strict=True))
    names = storages.name[is_gradient].tolist()
    first[is_gradient] = [first_of.get(name, own) for name, own in zip(names, first[is_gradient].tolist(), strict=True)]
    rows = -(-np.maximum(first, 1) // ranks)
    # A storage without a shape, such as a step counter, is not sharded.
    parts: Ints = storages.requested_bytes * rows // np.maximum(first, 1)
    return parts


def complete_at(step: Step, is_made: Bools) -> Ints:
    """Returns the backward operator that completes each gradient of the step; NONE elsewhere."""
    uses, ops = step.uses, step.ops
    found = np.where(is_made, step.storages.created_op_id, NONE)
    row = np.flatnonzero(is_made[uses.storage_id] & (ops.phase[uses.op_id] == "backward"))
    np.maximum.at(found, uses.storage_id[row], uses.op_id[row])
    return found


def buckets(kept_at: Ints, requested_bytes: Ints, bucket_mib: int) -> list[Ints]:
    """Returns the gradients of each bucket, filled in order of completion.

    Args:
        kept_at: Operator that completes each gradient, NONE elsewhere, shape ``(storages,)``.
        requested_bytes: Bytes of each storage, shape ``(storages,)``.
        bucket_mib: Size of a bucket; the first may be smaller.
    """
    made = np.flatnonzero(kept_at != NONE)
    made = made[np.argsort(kept_at[made], kind="stable")]
    return [np.array(bucket) for bucket in fill_buckets(made.tolist(), requested_bytes[made].tolist(), bucket_mib)]


@dataclass(frozen=True)
class Ring:
    """A ring of ranks, each sending to the next.

    A ring algorithm gathers or reduces in N - 1 rounds; in each, every rank sends 1/N of the data.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".

    Attributes:
        ranks: Number of ranks N.
        bytes_per_us: Bandwidth of a rank.
        latency_us: Latency of a message.
    """

    ranks: int
    bytes_per_us: float
    latency_us: float

    def all_gather_us(self, total_bytes: float) -> float:
        """Returns the time until every rank has all of the data, given its total size."""
        return (self.ranks - 1) * (self.latency_us + total_bytes / self.ranks / self.bytes_per_us)

    def reduce_scatter_us(self, total_bytes: float) -> float:
        """Returns the time until every rank has its part of the sum."""
        return self.all_gather_us(total_bytes)

    def all_reduce_us(self, total_bytes: float) -> float:
        """Returns the time until every rank has the sum: a reduce-scatter, then an all-gather."""
        return self.reduce_scatter_us(total_bytes) + self.all_gather_us(total_bytes)


def fill_buckets(numbers: Sequence[int], sizes_bytes: Iterable[int], bucket_mib: int) -> list[list[int]]:
    """Returns the contents of each bucket, in order; a bucket is full at or above its size.

    Args:
        numbers: Items to put into buckets, in order.
        sizes_bytes: Bytes of each.
        bucket_mib: Size of a bucket; the first may be smaller.
    """
    found: list[list[int]] = []
    room = 0
    for number, bytes_ in zip(numbers, sizes_bytes, strict=True):
        if room <= 0:
            room = bucket_mib * _MIB if found else min(_FIRST_BUCKET_BYTES, bucket_mib * _MIB)
            found.append([])
        found[-1].append(number)
        room -= bytes_
    return found


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a model; 0 is the root's.

    Attributes:
        count: Number of units.
        of_storage: Unit of each parameter and gradient; NONE for other storages. Shape (storages,).
        first_forward: First forward operator of each, NONE if it has none. Shape (units,).
        last_forward: Last forward operator.
        first_backward: First backward operator.
        last_backward: Last backward operator.
    """

    count: int
    of_storage: Ints
    first_forward: Ints
    last_forward: Ints
    first_backward: Ints
    last_backward: Ints


def find_units(step: Step, patterns: tuple[str, ...]) -> Units:
    """Finds the units, and when they run.

    Raises:
        PolicyError: A pattern matches no module.
    """
    modules, storages, ops, uses = step.modules, step.storages, step.ops, step.uses
    names = [str(name) for name in modules.name]
    chosen = choose_units(patterns, names, modules.type.tolist(), modules.parent_id.tolist())
    number_of = {name: number for number, name in enumerate(chosen, start=1)}
    of_module = np.full(len(modules) + 1, ROOT, dtype=np.int64)  # the last entry is for operators outside of modules
    for row, (name, parent) in enumerate(zip(names, modules.parent_id.tolist(), strict=True)):
        of_module[row] = number_of.get(name, of_module[parent] if parent != NONE else ROOT)
    count = len(number_of) + 1

    is_owned = np.isin(storages.category, ("parameter", "gradient"))
    of_storage = np.where(is_owned, of_module[storages.module_id], NONE)
    # A unit runs where its modules run, and where others use its weights.
    used = np.flatnonzero(storages.category[uses.storage_id] == "parameter")
    op = np.concatenate([np.arange(len(ops)), uses.op_id[used]])
    unit = np.concatenate([of_module[ops.module_id], of_storage[uses.storage_id[used]]])
    # Operators outside of modules (the loss) do not belong to the root.
    is_known = np.concatenate([ops.module_id != NONE, np.ones(len(used), dtype=np.bool_)])
    spans = []
    for phase in ("forward", "backward"):
        inside = is_known & (ops.phase[op] == phase) & (unit != NONE)
        first = np.full(count, len(ops), dtype=np.int64)
        last = np.full(count, NONE, dtype=np.int64)
        np.minimum.at(first, unit[inside], op[inside])
        np.maximum.at(last, unit[inside], op[inside])
        # The root runs as long as anything in it does.
        first[ROOT], last[ROOT] = first.min(), last.max()
        spans += [np.where(last == NONE, NONE, first), last]
    return Units(count, of_storage, *spans)


def choose_units(
    patterns: tuple[str, ...], names: Sequence[str], types: Sequence[str], parents: Sequence[int]
) -> list[str]:
    """Returns the units of a model, none nested in another, without the root's own, "".

    Args:
        patterns: Patterns of the modules; if empty, the layers: the outermost modules numbered in a list or a sequence,
            except single operations such as ReLU in a sequence.
        names: Names of all modules.
        types: Their types.
        parents: Row of each module's parent, -1 for a root.

    Raises:
        PolicyError: A pattern matches no module.
    """
    if patterns:
        return [name for name in outermost(match_modules(patterns, names)) if name]
    has_children = {parent for parent in parents if parent >= 0}
    return outermost(
        [
            name
            for row, (name, kind, parent) in enumerate(zip(names, types, parents, strict=True))
            if name.rpartition(".")[2].isdigit()
            and kind != "ModuleList"
            and (row in has_children or (parent >= 0 and types[parent] == "ModuleList"))
        ]
    )
