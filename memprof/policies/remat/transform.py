"""Predicts a step under the runtime, by simulating its rules on the recorded step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.remat.names import keys_of
from memprof.policies.remat.simulation import Course, Simulation
from memprof.policies.remat.units import Units, units_of
from memprof.policies.rewrite.draft import Draft
from memprof.trace.schema import NONE, Uses
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.remat.policy import Remat

#: Bytes the runtime leaves free in a budget; ``memory.MARGIN_BYTES`` at run time.
_MARGIN_BYTES = 16 * 1024
#: Runtime overhead per operator, and per tensor that autograd saves: measured as the time that an ample budget adds to
#: a step of the six jobs of tests/policies, on two cores of a virtual machine with torch 2.13.
OPERATOR_US, SAVED_US = 20.0, 12.0
#: Largest excess of the runtime's minimum over the predicted one, as a fraction of the budget.
ROOM = 0.05
#: Operators inserted by policies that replace saved tensors.
_OTHERS = ("memprof.swap_out", "memprof.compress")
#: Error where both are in one plan.
OVERLAP = "Two policies (remat, and swap or compress) would replace saved tensors; leave one of them out of the plan."


def transform(step: Step, policy: Remat, *, at_most: bool = False) -> Step:
    """Rewrites a step as the policy would change it.

    Args:
        step: The step.
        policy: The budget, and what is always recomputed.
        at_most: Use a somewhat smaller budget (ROOM): if that is infeasible, the runtime might have to end the job.

        es:
        PolicyError: The budget is less than an operator needs at once, or swap or compress were applied before.
    """
    if _replaces_saved(step):
        raise PolicyError(OVERLAP)
    units = units_of(step)
    at_once = _named(step, units, policy.recompute)
    allowed = 1 - ROOM if at_most else 1.0
    budget = max(int(policy.budget_bytes * allowed) - _MARGIN_BYTES, 1) if policy.budget else 0
    course = Simulation(step, units, budget, policy.heuristic, at_once).run()
    draft = Draft(step)
    _rewrite(draft, step, units, course)
    again = float(units.cost_us[np.array(course.source, dtype=np.int64)].sum()) if course.source else 0.0
    draft.duration_us += again + OPERATOR_US * len(step.ops) + SAVED_US * len(step.saved)
    return draft.build()


def _replaces_saved(step: Step) -> bool:
    """Returns whether a policy replaced tensors that autograd saved; optimizer state does not count."""
    is_others = np.isin(step.ops.name, _OTHERS)[step.uses.op_id]
    return bool((is_others & (step.storages.category[step.uses.storage_id] != "optimizer_state")).any())


def _named(step: Step, units: Units, recompute: tuple[str, ...]) -> set[int]:
    """Returns the storages that the keys name."""
    if not recompute:
        return set()
    wanted, keys = set(recompute), keys_of(step)
    # The last content that forward leaves is the one kept.
    return {storage for storage, made_by in units.makers.items() if keys[made_by[-1]] in wanted}


def _rewrite(draft: Draft, step: Step, units: Units, course: Course) -> None:
    """Ends lives where storages were dropped, and adds the recomputed operators with the lives they begin."""
    ops, total = step.ops, len(step.ops)
    source, before = np.array(course.source, dtype=np.int64), np.array(course.before, dtype=np.int64)
    rows = ops.take(source)
    rows = rows.replace(
        phase=ops.phase[before],
        micro_batch=ops.micro_batch[before],
        is_recompute=np.ones(len(rows), dtype=np.bool_),
        forward_op_id=np.full(len(rows), NONE),
    )
    draft.insert_ops(rows, before)  # their ids follow those of the step, in order
    freed = step.storages.freed_op_id.copy()
    recorded = [life for life in course.lives if life.born < 0]
    for first in recorded:
        if first.ended >= 0:
            freed[first.storage] = first.ended
    draft.storages = step.storages.replace(freed_op_id=freed)
    again = [number for number, life in enumerate(course.lives) if life.born >= 0]
    lives = [course.lives[number] for number in again]
    copied = step.storages.take(np.array([life.storage for life in lives], dtype=np.int64))
    ids = draft.insert_storages(
        copied.replace(
            created_op_id=np.array([total + life.born for life in lives], dtype=np.int64),
            freed_op_id=np.array([life.ended if life.ended >= 0 else NONE for life in lives], dtype=np.int64),
        )
    )
    storage_of = {number: life.storage for number, life in enumerate(course.lives) if life.born < 0}
    storage_of.update(zip(again, ids.tolist(), strict=True))

    count = len(step.storages)
    moved = {op_id * count + storage: storage_of[life] for (op_id, storage), life in course.reads.items()}
    uses = step.uses
    keys = uses.op_id * count + uses.storage_id
    wanted = np.array(sorted(moved), dtype=np.int64)
    storage_id = uses.storage_id.copy()
    if len(wanted):
        place = np.minimum(np.searchsorted(wanted, keys), len(wanted) - 1)
        found = wanted[place] == keys
        storage_id[found] = np.array([moved[key] for key in wanted.tolist()], dtype=np.int64)[place[found]]
    draft.uses = uses.replace(storage_id=storage_id)
    role, op_ids, touched = [], [], []
    for number, (reads, written) in enumerate(zip(course.again_reads, course.again_writes, strict=True)):
        for read in reads:
            role.append("read")
            op_ids.append(total + number)
            touched.append(storage_of[read] if read >= 0 else -1 - read)
        for life in written:
            role.append("write" if course.lives[life].born == number else "mutate")
            op_ids.append(total + number)
            touched.append(storage_of[life])
    draft.insert_uses(Uses.of(op_id=op_ids, storage_id=touched, role=np.array(role, dtype=np.object_)))
    # Autograd does not keep dropped storages.
    is_dropped = np.zeros(len(draft.storages), dtype=np.bool_)
    is_dropped[[life.storage for life in recorded if life.ended >= 0]] = True
    draft.saved = draft.saved.take(~is_dropped[draft.saved.storage_id])
