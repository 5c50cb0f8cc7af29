"""What is recomputed, where, and which copy of a storage each operator reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.policies.checkpoint.nodes import Nodes
from memprof.policies.checkpoint.regions import Regions
from memprof.policies.rewrite.draft import find_spans
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step

#: Later than every operator: the end of the step.
NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class Recompute:
    """Which operators are recomputed, and which storages are allocated again.

    Ids of copies follow those of the step, as in a Draft.

    Attributes:
        starts: Operator in backward before which each region is recomputed, NEVER where it is not; ``(regions,)``.
        stops: First forward operator of each region that is not recomputed; ``(regions,)``.
        op_region: Region of each copied operator, in the order of their ids.
        op_source: The operator it copies.
        storage_region: Region of each copied storage, in the order of their ids.
        storage_source: The storage it copies.
        storage_op: The copied operator that makes it.
    """

    starts: Ints
    stops: Ints
    op_region: Ints
    op_source: Ints
    storage_region: Ints
    storage_source: Ints
    storage_op: Ints
    _regions: Regions
    _op_base: Ints
    _op_slots: Ints
    _storage_base: Ints
    _storage_slots: Ints
    _created: Ints
    _casts: tuple[Ints, Ints, Ints]  # region and storage of each repeated cast, and its copy

    @property
    def marked(self) -> Ints:
        """The regions whose recompute runs no operator: it stops before the first kernel."""
        return np.setdiff1d(np.flatnonzero(self.starts != NEVER), self.op_region)

    def copy_of(self, region: Ints, op_id: Ints) -> Ints:
        """Returns the copy of an operator in a region's recompute, or that of the last operator before it with one.

        For an operator before the region, or NONE, that is the region's first copy.
        """
        first = self._regions.first[region]
        last = np.maximum(np.minimum(op_id, self._regions.last[region]), first)
        copies: Ints = self._op_slots[self._op_base[region] + last - first]
        return copies

    def storage_read(self, region: Ints, storage_id: Ints) -> tuple[Ints, Ints]:
        """Returns the storage that a reader in a region's recompute, or in its backward, reads.

        Args:
            region: The region, NONE outside all regions.
            storage_id: The storage in the recorded step.

        Returns:
            The region whose copy it is, NONE where it is the storage itself, and the id.
        """
        found = self._regions.made_in(region, self._created[storage_id])
        slot = np.where(found != NONE, self._storage_base[found] + storage_id, 0)
        copy = np.where(found != NONE, self._storage_slots[slot], NONE)
        regions, storages, copies = self._casts
        cast = find_spans(storage_id, region, of=storages, first=regions, last=regions)
        found, copy = np.where(cast != NONE, region, found), np.where(cast != NONE, np.append(copies, NONE)[cast], copy)
        return np.where(copy != NONE, found, NONE), np.where(copy != NONE, copy, storage_id)


def plan_recompute(
    step: Step, regions: Regions, nodes: Nodes, is_kept: Bools, casts: tuple[Ints, Ints, Ints]
) -> Recompute:
    """Decides where each region is recomputed and how far.

    A region is recomputed when the first thing it keeps is needed: before the first node that reads a tensor saved in
    it, or before the recompute of an inner region, whose inputs it keeps. torch stops the recompute once the last saved
    tensor was packed: an operator packs its inputs before its kernel runs and its outputs after it.

    Args:
        step: The step.
        regions: The regions.
        nodes: Moments of the backward nodes.
        is_kept: Operators whose outputs are kept, shape ``(ops,)``.
        casts: Region, storage and first reading operator of each cast parameter that a region finds in autocast's
            cache. The cache is empty during the recompute, so the region casts again.
    """
    storages, ops = step.storages, step.ops
    count = len(regions)
    starts, stops, last_packing = _starts_and_stops(step, regions, nodes)
    counts_batches = _counts_batches(step)
    op_region, op_source, op_slots = [], [], []
    cast_regions, cast_storages, cast_ops = [], [], []
    op_base = np.zeros(count, dtype=np.int64)
    total = slots = 0
    for region in range(count):
        first, last = int(regions.first[region]), int(regions.last[region])
        span = np.arange(first, last + 1)
        is_copied = (span < stops[region]) & ~is_kept[span] & ~counts_batches[span]
        own = span[is_copied]
        source, place = own, np.arange(len(own)) + len(ops) + total
        mine = np.flatnonzero(casts[0] == region) if len(casts[0]) else casts[0]
        mine = mine[(casts[2][mine] < stops[region]) | (casts[2][mine] <= last_packing[region])]
        if len(mine):
            order = np.argsort(np.append(own, casts[2][mine] - 0.5), kind="stable")
            source = np.append(own, storages.created_op_id[casts[1][mine]])[order]
            place = np.empty(len(order), dtype=np.int64)
            place[order] = np.arange(len(order)) + len(ops) + total
        cast_regions.append(np.full(len(mine), region))
        cast_storages.append(casts[1][mine])
        cast_ops.append(place[len(own) :])
        op_base[region] = slots
        # An operator without a copy maps to the last copy before it, the first ones to the first.
        if len(own):
            op_slots.append(place[np.maximum(np.cumsum(is_copied) - 1, 0)])
        else:
            op_slots.append(np.full(len(span), NONE))
        op_region.append(np.full(len(source), region))
        op_source.append(source)
        total += len(source)
        slots += len(span)

    # Storages are in order of allocation: those of a region are consecutive.
    storage_region, storage_source, storage_slots = [], [], []
    storage_base = np.zeros(count, dtype=np.int64)
    total = slots = 0
    for region in range(count):
        low = int(np.searchsorted(storages.created_op_id, regions.first[region]))
        high = int(np.searchsorted(storages.created_op_id, regions.last[region], side="right"))
        made = storages.created_op_id[low:high]
        is_copied = (made < stops[region]) & ~is_kept[made] & ~counts_batches[made]
        storage_base[region] = slots - low
        storage_slots.append(np.where(is_copied, len(storages) + total + np.cumsum(is_copied) - 1, NONE))
        storage_region.append(np.full(int(is_copied.sum()), region))
        storage_source.append(np.arange(low, high)[is_copied])
        total += int(is_copied.sum())
        slots += high - low
    regions_of, sources = np.concatenate(storage_region), np.concatenate(storage_source)
    slots_of_ops = np.concatenate(op_slots)
    made_by = slots_of_ops[op_base[regions_of] + storages.created_op_id[sources] - regions.first[regions_of]]
    of_casts, cast = np.concatenate(cast_regions), np.concatenate(cast_storages)
    return Recompute(
        starts=starts,
        stops=stops,
        op_region=np.concatenate(op_region),
        op_source=np.concatenate(op_source),
        storage_region=np.append(regions_of, of_casts),
        storage_source=np.append(sources, cast),
        storage_op=np.append(made_by, np.concatenate(cast_ops)),
        _regions=regions,
        _op_base=op_base,
        _op_slots=slots_of_ops,
        _storage_base=storage_base,
        _storage_slots=np.append(np.concatenate(storage_slots), NONE),
        _created=storages.created_op_id,
        _casts=(of_casts, cast, len(storages) + total + np.arange(len(cast))),
    )


def _starts_and_stops(step: Step, regions: Regions, nodes: Nodes) -> tuple[Ints, Ints, Ints]:
    """Returns where each region's recompute starts and stops, and its last operator that saves something."""
    saved = step.saved
    count = len(regions)
    row_region = regions.innermost[saved.forward_op_id]
    is_inside = (row_region != NONE) & (nodes.first[saved.forward_op_id] != NONE)
    rows, owner = np.flatnonzero(is_inside), row_region[is_inside]

    starts = np.full(count, NEVER, dtype=np.int64)
    np.minimum.at(starts, owner, nodes.first[saved.forward_op_id[rows]])
    is_output = _writes(step, saved.forward_op_id[rows], saved.storage_id[rows])
    stops = np.full(count, NONE, dtype=np.int64)
    np.maximum.at(stops, owner, saved.forward_op_id[rows] + is_output)
    # The operator that packs last has its arguments cast, even where its kernel does not run.
    last_packing = np.full(count, NONE, dtype=np.int64)
    np.maximum.at(last_packing, owner, saved.forward_op_id[rows])
    for region in range(count - 1, -1, -1):
        parent = regions.parent[region]
        if parent != NONE and starts[region] != NEVER:
            starts[parent] = min(starts[parent], starts[region])
            stops[parent] = max(stops[parent], regions.first[region])
    return starts, stops, last_packing


def _writes(step: Step, op_ids: Ints, storage_ids: Ints) -> Bools:
    uses = step.uses
    is_write = uses.role != "read"
    key = uses.op_id[is_write] * len(step.storages) + uses.storage_id[is_write]
    return np.isin(op_ids * len(step.storages) + storage_ids, key)


def _counts_batches(step: Step) -> Bools:
    """Marks the operators that count BatchNorm's batches, which ``apply`` excludes from the recompute."""
    is_count = np.zeros(len(step.storages), dtype=np.bool_)
    for row in np.flatnonzero(step.storages.category == "buffer"):
        is_count[row] = str(step.storages.name[row]).endswith("num_batches_tracked")
    counts = np.zeros(len(step.ops), dtype=np.bool_)
    counts[step.uses.op_id[is_count[step.uses.storage_id]]] = True
    return counts
