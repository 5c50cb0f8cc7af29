"""Predicts a step under the runtime, by simulating its rules on the recorded step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.evict.outline import Units, outline_of, units_of
from memprof.policies.evict.planned import keys_of, planned_course
from memprof.policies.evict.simulation import Course
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.insertion import COMPRESS, SWAP_OUT
from memprof.policies.rewrite.stack_marks import describe_hooks, may_be_compiled
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE, Ints
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
_OTHERS = (SWAP_OUT, COMPRESS)
#: Error where torch.compile has compiled what would be recomputed.
COMPILED = (
    "{what} is compiled by torch.compile, whose operators are invisible to remat: leave one of the two out, or give "
    "the compiler a budget with --compile."
)
#: Error where both are in one plan.
OVERLAP = "two policies (remat, and swap or compress) would replace saved tensors; leave one of them out of the plan."


def transform(step: Step, policy: Remat, *, at_most: bool = False) -> Step:
    """Rewrites a step as the policy would change it.

    Args:
        step: The step.
        policy: The budget, and what is always recomputed.
        at_most: Use a somewhat smaller budget (ROOM): if that is infeasible, the runtime might have to end the job.

    Raises:
        PolicyError: The budget is less than an operator needs at once, swap or compress were applied before, or part of
            the step ran in code that torch.compile generated.
    """
    if _replaces_saved(step):
        raise PolicyError(OVERLAP)
    if may_be_compiled(step).any():
        raise PolicyError(COMPILED.format(what="part of the model"))
    units = units_of(step)
    at_once = _named(step, units, policy.recompute)
    allowed = 1 - ROOM if at_most else 1.0
    budget_bytes = policy.bytes_of(int(live_bytes(step).during.max())) if policy.budget else 0
    step = _holding_inputs(step, units)
    budget = max(int(budget_bytes * allowed) - _MARGIN_BYTES, 1) if policy.budget else 0
    try:
        course = planned_course(outline_of(step, units), budget, policy.heuristic, at_once)
    except PolicyError as error:
        hooked = np.flatnonzero(step.ops.is_hooked)
        if not len(hooked):
            raise
        raise PolicyError(f"{error} {describe_hooks(step, hooked, 'remat')}") from None
    draft = Draft(step)
    _rewrite(draft, course)
    draft.duration_us += course.again_us + OPERATOR_US * len(step.ops) + SAVED_US * len(step.saved)
    return draft.build()


def _replaces_saved(step: Step) -> bool:
    """Returns whether a policy replaced tensors that autograd saved; optimizer state does not count."""
    is_others = np.isin(step.ops.name, _OTHERS)[step.uses.op_id]
    return bool((is_others & (step.storages.category[step.uses.storage_id] != "optimizer_state")).any())


def _holding_inputs(step: Step, units: Units) -> Step:
    """Returns the step with what cannot be recomputed alive for as long as what is computed from it may be."""
    storages, outline = step.storages, outline_of(step, units)
    until = np.array(outline.known_until, dtype=np.int64)
    rows = np.unique([source for sources in units.sources.values() for source in sources]).astype(np.int64)
    rows = rows[~units.can_recompute[rows] & (until[rows] > np.array(outline.freed, dtype=np.int64)[rows])]
    freed = storages.freed_op_id.copy()
    freed[rows] = np.where(until[rows] < len(step.ops), until[rows], NONE)
    return dataclasses.replace(step, storages=storages.replace(freed_op_id=freed))


def _named(step: Step, units: Units, recompute: tuple[str, ...]) -> frozenset[int]:
    if not recompute:
        return frozenset()
    wanted, keys = set(recompute), keys_of(step)
    # The last content that forward leaves is the one kept.
    return frozenset(storage for storage, made_by in units.makers.items() if keys[made_by[-1]] in wanted)


def _rewrite(draft: Draft, course: Course) -> None:
    """Ends lives where storages were dropped, and adds the recomputed operators with the lives they begin."""
    repeats = draft.repeat_ops(np.array(course.source, dtype=np.int64), np.array(course.before, dtype=np.int64))
    lives = course.lives
    roles: dict[str, list[tuple[int, int]]] = {"read": [], "write": [], "mutate": []}
    for number, (reads, written) in enumerate(zip(course.again_reads, course.again_writes, strict=True)):
        roles["read"] += [(number, lives[read].storage if read >= 0 else -1 - read) for read in reads]
        for life in written:
            roles["write" if lives[life].born == number else "mutate"].append((number, lives[life].storage))
    for role, pairs in roles.items():
        numbers, touched = _columns(pairs)
        draft.use(repeats[numbers], touched, role)
    # From the operator that recomputes a storage on, that is the one used, up to its next recomputation.
    storage, born, ended = _columns([(life.storage, life.born, life.ended) for life in lives if life.born >= 0], 3)
    created = repeats[born]
    draft.redirect_uses(storage, draft.copy_storages(storage, created, ended), created)
    dropped, last = _columns([(life.storage, life.ended) for life in lives if life.born < 0 <= life.ended])
    draft.free(dropped, last)
    draft.unsave(dropped)


def _columns(rows: Sequence[tuple[int, ...]], count: int = 2) -> Ints:
    return np.array(rows, dtype=np.int64).reshape(-1, count).T
