"""When every storage of a checkpointed step dies: originals, copies, and torch's own random states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.policies.checkpoint.nodes import Nodes
from memprof.policies.checkpoint.recompute import NEVER, Recompute
from memprof.policies.checkpoint.references import python_death
from memprof.policies.checkpoint.regions import Regions
from memprof.trace.schema import NONE, Bools, Ints, Storages
from memprof.trace.step import Step

#: Bytes of torch.get_rng_state(), the state of torch's Mersenne Twister: a CPU tensor that torch's checkpoint takes
#: before a region runs, for its second run, and once more around that. Measured with torch 2.13; it is the size of a
#: C++ structure and has not changed since 2018.
RANDOM_STATE_BYTES = 5056


@dataclass(frozen=True, eq=False)
class Lives:
    """Ids are those of a Draft: the step's own, then copies, then markers.

    Attributes:
        before: Operator before which each copy, then each marker, is inserted.
        marked: Regions that run again without an operator and get a marker.
        ends: Last operator of each region's second run, NONE where it does not run; shape ``(regions,)``.
        freed: ``freed_op_id`` of the step's own storages.
        copies_freed: ``freed_op_id`` of the copied storages.
        states: The random states.
    """

    before: Ints
    marked: Ints
    ends: Ints
    freed: Ints
    copies_freed: Ints
    states: Storages

    def save_op(self, recompute: Recompute, region: Ints, op_id: Ints) -> Ints:
        """Returns the operator that saves in a second run what an operator saved in the first.

        That is its copy, or the last one where it does not run again because the run stops when its inputs are saved.
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
) -> Lives:
    """Finds when everything dies.

    Moments are compared as ranks: positions in the order of the new step.
    """
    count, ops = len(regions), len(step.ops)
    saved, storages = step.saved, step.storages
    runs = recompute.starts != NEVER
    has_copies = np.zeros(count, dtype=np.bool_)
    has_copies[recompute.op_region] = True
    marked = np.flatnonzero(runs & ~has_copies)
    before = np.append(recompute.starts[recompute.op_region], recompute.starts[marked])
    place = np.append(np.arange(ops, dtype=np.float64), before - 0.5)
    order = np.argsort(place, kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))

    # Where the second run of each region begins and ends.
    begins, ends = np.full(count, NONE, dtype=np.int64), np.full(count, NONE, dtype=np.int64)
    copies = np.arange(len(recompute.op_region)) + ops
    begins[recompute.op_region[::-1]] = copies[::-1]
    ends[recompute.op_region] = copies
    begins[marked] = ends[marked] = np.arange(len(marked)) + ops + len(copies)
    end_rank = rank[ends]

    # A region's frame, and with it the inputs, dies when all that was saved in it is released; a region inside it
    # keeps its inputs as tensors saved in the outer one.
    row_region = regions.innermost[saved.forward_op_id]
    runs_back = nodes.first[saved.forward_op_id] != NONE
    is_row = (row_region != NONE) & runs_back
    frame = rank[regions.last]
    np.maximum.at(frame, row_region[is_row], rank[nodes.released[saved.forward_op_id[is_row]]])
    for region in range(count - 1, -1, -1):
        if regions.parent[region] != NONE:
            frame[regions.parent[region]] = max(frame[regions.parent[region]], frame[region])

    python = python_death(step, nodes)
    python_rank = np.where(python != NONE, rank[python], NEVER)

    # The step's own storages.
    is_touched = np.zeros(len(storages), dtype=np.bool_)
    is_touched[saved.storage_id[is_row]] = True
    dies = np.where(storages.freed_op_id != NONE, rank[storages.freed_op_id], NEVER)
    dies[is_touched] = python_rank[is_touched]
    is_outside = (row_region == NONE) & runs_back & is_touched[saved.storage_id]
    outside = saved.forward_op_id[is_outside]
    np.maximum.at(
        dies,
        saved.storage_id[is_outside],
        np.minimum(
            rank[nodes.released[outside]],
            # Known exactly where the storage died with this node.
            _rank_or_never(rank, storages.freed_op_id[saved.storage_id[is_outside]]),
        ),
    )
    is_outermost = regions.parent[inputs[0]] == NONE
    held_by = inputs[0][is_outermost]
    np.maximum.at(dies, inputs[1][is_outermost], np.where(runs[held_by], frame[held_by], NONE))

    # Copies: Python lets go of them as it did the first time, or when the run ends; backward when it has read them.
    owner, source = recompute.storage_region, recompute.storage_source
    made_again = recompute.storage_op
    let_go = python[source]
    is_within = (let_go != NONE) & (let_go < recompute.stops[owner])
    copy_dies = np.where(is_within, rank[recompute.copy_of(owner, np.maximum(let_go, 0))], end_rank[owner])
    copy_dies = np.maximum(copy_dies, rank[made_again])
    all_dies = np.append(dies, copy_dies)
    rows = np.flatnonzero(is_row)
    found, read = recompute.storage_read(row_region[rows], saved.storage_id[rows])
    returned = np.maximum(nodes.returned[saved.forward_op_id[rows]], saved.released_op_id[rows])
    own_made = regions.made_in(row_region[rows], storages.created_op_id[saved.storage_id[rows]])
    is_copy = (found != NONE) | (own_made != NONE)
    np.maximum.at(all_dies, read[is_copy], rank[returned[is_copy]])
    # A region inside reads its inputs when it runs again, and holds them while it does.
    is_inner = (regions.parent[inputs[0]] != NONE) & runs[inputs[0]]
    inner = inputs[0][is_inner]
    found, read = recompute.storage_read(regions.parent[inner], inputs[1][is_inner])
    np.maximum.at(all_dies, read[found != NONE], end_rank[inner[found != NONE]])
    _hold_kept(all_dies, step, regions, recompute, is_kept, python, rank, end_rank, frame)

    states = _random_states(step, regions, recompute, rank, order, begins, ends, frame)
    freed = np.where(all_dies == NEVER, NONE, order[np.minimum(all_dies, len(order) - 1)])
    return Lives(before, marked, ends, freed[: len(storages)], freed[len(storages) :], states)


def _rank_or_never(rank: Ints, op_ids: Ints) -> Ints:
    return np.where(op_ids != NONE, rank[op_ids], NEVER)


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
    """Lets outputs that are kept live on.

    The second run takes them out of torch's cache where their operator stood, and Python lets go of them as it did the
    first time; those of operators that it does not reach stay in the cache until the region's frame dies.
    """
    created = step.storages.created_op_id
    is_output = np.zeros(len(created), dtype=np.bool_)
    is_output[step.uses.storage_id[step.uses.role == "write"]] = True
    kept = np.flatnonzero((created != NONE) & is_kept[created] & is_output)
    region = regions.innermost[created[kept]]
    is_reached = created[kept] < recompute.stops[region]
    let_go = python[kept]
    is_within = (let_go != NONE) & (let_go < recompute.stops[region])
    copy = recompute.copy_of(region, np.maximum(let_go, created[kept]))
    taken = np.where(is_within & (copy != NONE), rank[copy], end_rank[region])
    dies[kept] = np.maximum(dies[kept], np.where(is_reached, taken, frame[region]))


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
    """Makes the random states that torch keeps for each region and takes around each second run.

    The first lives as long as the region's frame. A region inside another takes one in the other's second run, too,
    which ends with that run.
    """
    on_cpu = (step.storages.device == "cpu") & (step.storages.created_op_id != NONE)
    if not on_cpu.any():
        return Storages.empty()
    runs = np.flatnonzero(recompute.starts != NEVER)
    created = [regions.first, begins[runs]]
    freed = [order[frame], ends[runs]]
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
