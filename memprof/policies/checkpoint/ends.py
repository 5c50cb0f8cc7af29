"""When every storage of a checkpointed step is freed: originals, copies, and torch's saved random states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.policies.checkpoint.nodes import Nodes, python_death
from memprof.policies.checkpoint.recompute import NEVER, Recompute
from memprof.policies.checkpoint.regions import Regions
from memprof.policies.rewrite.held_by_python import cached_storages, carried_over
from memprof.trace.schema import NONE, Bools, Ints, Storages
from memprof.trace.step import Step

#: Bytes of torch.get_rng_state(), the state of torch's Mersenne Twister: a CPU tensor that torch's checkpoint
#: allocates before a region runs, for its recompute, and once more around that. Measured with torch 2.13; it is the
#: size of a C++ structure and has not changed since 2018.
RANDOM_STATE_BYTES = 5056


@dataclass(frozen=True, eq=False)
class StorageEnds:
    """When storages are freed; ids are those of a Draft: the step's own, then copies, then markers.

    Attributes:
        ends: Last operator of each region's recompute, NONE where there is none; shape ``(regions,)``.
        freed: ``freed_op_id`` of the step's own storages.
        copies_freed: ``freed_op_id`` of the copied storages.
        states: The random states.
    """

    ends: Ints
    freed: Ints
    copies_freed: Ints
    states: Storages

    def save_op(self, recompute: Recompute, region: Ints, op_id: Ints) -> Ints:
        """Returns the operator that saves in the recompute what an operator saved in the first run.

        That is its copy, or the last one where the recompute stops before it because its inputs are saved.
        """
        copy = recompute.copy_of(region, np.minimum(op_id, recompute.stops[region] - 1))
        return np.where((copy == NONE) | (op_id >= recompute.stops[region]), self.ends[region], copy)


def find_lives(
    step: Step,
    regions: Regions,
    nodes: Nodes,
    recompute: Recompute,
    inputs: tuple[Ints, Ints],
    is_kept: Bools,
    rank: Ints,
) -> StorageEnds:
    """Finds when each storage is freed.

    Times are compared as ranks: positions in the order of the new step, copies and markers included.
    """
    count, storages = len(regions), step.storages
    runs = recompute.starts != NEVER
    order = np.argsort(rank)

    # Where the recompute of each region begins and ends.
    begins, ends = np.full(count, NONE, dtype=np.int64), np.full(count, NONE, dtype=np.int64)
    region_of = np.append(recompute.op_region, recompute.marked)
    copies = np.arange(len(region_of)) + len(step.ops)
    begins[region_of[::-1]] = copies[::-1]
    ends[region_of] = copies
    end_rank = rank[ends]

    frame = _frame_deaths(step, regions, nodes, rank)
    python = python_death(step, nodes)
    all_dies = np.append(
        _own_deaths(step, regions, nodes, inputs, python, rank, np.where(runs, frame, NONE)),
        _python_deaths_again(recompute, python, rank, end_rank),
    )
    _hold_saved_again(all_dies, step, regions, nodes, recompute, rank)
    # A region inside another reads its inputs when it is recomputed, and references them until then.
    is_inner = (regions.parent[inputs[0]] != NONE) & runs[inputs[0]]
    inner = inputs[0][is_inner]
    found, read = recompute.storage_read(regions.parent[inner], inputs[1][is_inner])
    np.maximum.at(all_dies, read[found != NONE], end_rank[inner[found != NONE]])
    _hold_kept(all_dies, step, regions, recompute, is_kept, python, rank, end_rank, frame)
    _hold_caches(all_dies, step, regions, frame)

    states = _random_states(step, regions, recompute, rank, order, begins, ends, frame)
    freed = _op_or_none(order, all_dies)
    return StorageEnds(ends, freed[: len(storages)], freed[len(storages) :], states)


def _frame_deaths(step: Step, regions: Regions, nodes: Nodes, rank: Ints) -> Ints:
    """Returns the rank after which torch's frame of each region, and with it the inputs, is freed; ``(regions,)``.

    It is freed when everything saved in it is released. Inputs of a region inside it are tensors saved in it. Where no
    backward comes through a region, its frame lives as long as its results, beyond the step where these outlive it.
    """
    saved = step.saved
    region = regions.innermost[saved.forward_op_id]
    rows = np.flatnonzero((region != NONE) & (nodes.first[saved.forward_op_id] != NONE))
    frame = rank[regions.last]
    np.maximum.at(frame, region[rows], rank[nodes.released[saved.forward_op_id[rows]]])
    has_node = np.zeros(len(regions), dtype=np.bool_)
    has_node[region[rows]] = True
    owner, results = _results(step, regions)
    is_idle = ~has_node[owner]
    np.maximum.at(frame, owner[is_idle], _rank_or_never(rank, step.storages.freed_op_id[results[is_idle]]))
    for inner in range(len(regions) - 1, -1, -1):
        outer = regions.parent[inner]
        if outer != NONE:
            frame[outer] = max(frame[outer], frame[inner])
    return frame


def _results(step: Step, regions: Regions) -> tuple[Ints, Ints]:
    """Returns the storages made in a region that live on after it, as pairs of region and storage."""
    created, freed = step.storages.created_op_id, step.storages.freed_op_id
    region = np.where(created == NONE, NONE, regions.innermost[created])
    last = np.append(regions.last, NONE)[region]
    rows = np.flatnonzero((region != NONE) & ((freed == NONE) | (freed > last)))
    return region[rows], rows


def _own_deaths(
    step: Step, regions: Regions, nodes: Nodes, inputs: tuple[Ints, Ints], python: Ints, rank: Ints, held: Ints
) -> Ints:
    """Returns the rank after which each of the step's own storages is freed: as recorded where no region saved it.

    Args:
        step: The step.
        regions: The regions.
        nodes: Moments of the backward nodes.
        inputs: Regions and their inputs.
        python: When Python drops its last reference to each storage.
        rank: Ranks of operators.
        held: Rank up to which each region references its inputs, NONE where it does not.
    """
    saved, freed = step.saved, step.storages.freed_op_id
    region = regions.innermost[saved.forward_op_id]
    runs_back = nodes.first[saved.forward_op_id] != NONE
    is_touched = np.zeros(len(freed), dtype=np.bool_)
    is_touched[saved.storage_id[(region != NONE) & runs_back]] = True
    recorded = _rank_or_never(rank, freed)
    dies = np.where(is_touched, _rank_or_never(rank, python), recorded)
    # Also saved outside of all regions: the node keeps it, but no longer than recorded, which is exact.
    rows = np.flatnonzero((region == NONE) & runs_back & is_touched[saved.storage_id])
    storage_ids = saved.storage_id[rows]
    released = rank[nodes.released[saved.forward_op_id[rows]]]
    np.maximum.at(dies, storage_ids, np.minimum(released, recorded[storage_ids]))
    is_outermost = regions.parent[inputs[0]] == NONE
    np.maximum.at(dies, inputs[1][is_outermost], held[inputs[0][is_outermost]])
    return dies


def _python_deaths_again(recompute: Recompute, python: Ints, rank: Ints, end_rank: Ints) -> Ints:
    """Returns the rank after which Python drops each copy: as in the first run, or when the recompute ends."""
    owner, let_go = recompute.storage_region, python[recompute.storage_source]
    is_within = (let_go != NONE) & (let_go < recompute.stops[owner])
    dies = np.where(is_within, rank[recompute.copy_of(owner, np.maximum(let_go, 0))], end_rank[owner])
    return np.maximum(dies, rank[recompute.storage_op])


def _hold_saved_again(dies: Ints, step: Step, regions: Regions, nodes: Nodes, recompute: Recompute, rank: Ints) -> None:
    """Keeps what a region saves in its recompute until the function of the node that reads it has returned."""
    saved = step.saved
    region = regions.innermost[saved.forward_op_id]
    rows = np.flatnonzero((region != NONE) & (nodes.first[saved.forward_op_id] != NONE))
    found, read = recompute.storage_read(region[rows], saved.storage_id[rows])
    made_in = regions.made_in(region[rows], step.storages.created_op_id[saved.storage_id[rows]])
    returned = np.maximum(nodes.returned[saved.forward_op_id[rows]], saved.released_op_id[rows])
    is_made_inside = (found != NONE) | (made_in != NONE)
    np.maximum.at(dies, read[is_made_inside], rank[returned[is_made_inside]])


def _rank_or_never(rank: Ints, op_ids: Ints) -> Ints:
    return np.where(op_ids != NONE, rank[op_ids], NEVER)


def _op_or_none(order: Ints, ranks: Ints) -> Ints:
    return np.where(ranks == NEVER, NONE, order[np.minimum(ranks, len(order) - 1)])


def _hold_kept(
    dies: Ints,
    step: Step,
    regions: Regions,
    recompute: Recompute,
    is_kept: Bools,
    python: Ints,
    rank: Ints,
    end_rank: Ints,
    frame: Ints,
) -> None:
    """Extends the lifetimes of kept outputs.

    The recompute takes them out of torch's cache in place of their operator, and Python drops them as in the first
    run; those of operators that it does not reach stay in the cache until the region's frame is freed.
    """
    created, uses = step.storages.created_op_id, step.uses
    is_output = np.zeros(len(created), dtype=np.bool_)
    # lift_fresh returns the tensor that torch.tensor made just before it: it is made there and not written.
    is_output[uses.storage_id[(uses.role == "write") | (uses.op_id > created[uses.storage_id])]] = True
    kept = np.flatnonzero((created != NONE) & is_kept[created] & is_output)
    region = regions.innermost[created[kept]]
    is_reached = created[kept] < recompute.stops[region]
    let_go = python[kept]
    is_within = (let_go != NONE) & (let_go < recompute.stops[region])
    copy = recompute.copy_of(region, np.maximum(let_go, created[kept]))
    taken = np.where(is_within & (copy != NONE), rank[copy], end_rank[region])
    dies[kept] = np.maximum(dies[kept], np.where(is_reached, taken, frame[region]))


def _hold_caches(dies: Ints, step: Step, regions: Regions, frame: Ints) -> None:
    """Keeps a model's cache of keys and values with the frames of the regions that put some into it.

    The cache is an argument of theirs. It holds the keys and values of all layers called by the same module.
    """
    calls, cached = step.module_calls, cached_storages(step)
    made = step.storages.created_op_id[cached]
    is_outer = (calls.parent_call_id == NONE) & ~calls.is_recompute & (calls.first_op_id != NONE)
    model = np.searchsorted(np.sort(calls.first_op_id[is_outer]), made, side="right")
    held = np.full(int(is_outer.sum()) + 1, NONE, dtype=np.int64)
    region = regions.innermost[made]
    np.maximum.at(held, model[region != NONE], frame[region[region != NONE]])
    dies[cached] = np.maximum(dies[cached], held[model])


def _left_by_step_before(step: Step, regions: Regions, frame: Ints) -> Ints:
    """Returns the operators after which frames that the step before left are freed: with their results."""
    older = carried_over(step, step.storages.created_op_id != NONE)
    owner, results = _results(step, regions)
    is_left = (frame[owner] == NEVER) & (older[results] != NONE)
    last = np.full(len(regions), NONE, dtype=np.int64)
    np.maximum.at(last, owner[is_left], step.storages.freed_op_id[older[results[is_left]]])
    ends: Ints = last[last != NONE]
    return ends


def _random_states(
    step: Step,
    regions: Regions,
    recompute: Recompute,
    rank: Ints,
    order: Ints,
    begins: Ints,
    ends: Ints,
    frame: Ints,
) -> Storages:
    """Creates the random states that torch keeps for each region and takes around each recompute.

    The first lives as long as the region's frame, and where that outlives the step, the frame of the step before did
    so, too. A region inside another also takes one in the recompute of the other, until that ends.
    """
    on_cpu = (step.storages.device == "cpu") & (step.storages.created_op_id != NONE)
    if not on_cpu.any():
        return Storages.empty()
    runs = np.flatnonzero(recompute.starts != NEVER)
    created = [regions.first, begins[runs]]
    freed = [_op_or_none(order, frame), ends[runs]]
    left = _left_by_step_before(step, regions, frame)
    created.append(np.full(len(left), NONE))
    freed.append(left)
    for region in range(len(regions)):
        around = int(regions.parent[region])
        while around != NONE:
            if recompute.starts[around] != NEVER and regions.first[region] < recompute.stops[around]:
                created.append(recompute.copy_of(np.array([around]), regions.first[region : region + 1]))
                freed.append(ends[around : around + 1])
            around = int(regions.parent[around])
    created_op_id, freed_op_id = np.concatenate(created), np.concatenate(freed)
    count = len(created_op_id)
    return Storages.of(
        storage_id=np.zeros(count),
        category=np.full(count, "unknown"),
        device=np.full(count, "cpu"),
        requested_bytes=np.full(count, RANDOM_STATE_BYTES),
        allocated_bytes=np.full(count, RANDOM_STATE_BYTES),
        created_op_id=created_op_id,
        freed_op_id=freed_op_id,
        shape=np.full(count, str(RANDOM_STATE_BYTES)),
        dtype=np.full(count, "uint8"),
    )
