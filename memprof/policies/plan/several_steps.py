"""Rewrites several steps of one job, all of which must fit a plan's budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.allocator.policy import Allocator
from memprof.policies.base import Policy
from memprof.trace.schema import NONE, Memory
from memprof.trace.step import Step

#: Categories that are live between two updates and that policies may free there.
_KEPT = ("gradient", "optimizer_state")

#: Steps of a job as dry runs recorded them, by the policies they ran under; one for each step as recorded.
DrySteps = Mapping[tuple[Policy, ...], tuple[Step, ...]]
NO_DRY_STEPS: DrySteps = MappingProxyType({})
#: Why a job refused policies in a dry run, by those it ran under.
Refusals = Mapping[tuple[Policy, ...], str]


def frame_of(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """Returns the policies of a plan that change which kernels run, in their order: a dry run predicts those."""
    return tuple(policy for policy in policies if policy.changes_kernels)


def split_dry_run(
    policies: Sequence[Policy], steps: Sequence[Step], dry_steps: DrySteps
) -> tuple[tuple[Step, ...], tuple[Policy, ...]]:
    """Returns the steps from which a plan is predicted, and the policies that remain to be predicted.

    Args:
        policies: The plan's, in their order.
        steps: The steps as recorded.
        dry_steps: Steps from dry runs; those under the most of the plan's policies are taken.
    """
    plan = tuple(policies)
    frame = frame_of(plan)
    # The model of a policy that changes kernels expects those before it in the order to have been applied.
    known = (each for each in dry_steps if set(each) <= set(plan) and frame[: len(own := frame_of(each))] == own)
    chosen = max(known, key=len, default=())
    return dry_steps.get(chosen, tuple(steps)), tuple(policy for policy in plan if policy not in chosen)


def sources_of(policies: Sequence[Policy], dry_steps: DrySteps) -> tuple[str, ...]:
    """Returns how the effect of each policy of a plan is obtained, one of policies.base.SOURCES."""
    predicted = split_dry_run(policies, (), dry_steps)[1]
    return tuple(policy.source if policy in predicted else "dry-run" for policy in policies)


def steps_under(
    policies: Sequence[Policy], steps: Sequence[Step], dry_steps: DrySteps = NO_DRY_STEPS, *, at_most: bool = False
) -> tuple[Step, ...]:
    """Rewrites several steps of a job through a plan.

    Args:
        policies: The plan's, in their order.
        steps: The steps as recorded; the first is the one that the plan was chosen on.
        dry_steps: Steps from dry runs, to start from instead.
        at_most: Make worst-case assumptions for data missing from the recording.

    Raises:
        PolicyError: A policy does not fit the first step.
    """
    predicted, remaining = split_dry_run(policies, steps, dry_steps)
    for policy in remaining:
        predicted = transform_all(policy, predicted, at_most=at_most)
    return predicted


def host_bytes_under(policies: Sequence[Policy], steps_before: Callable[[tuple[Policy, ...]], Sequence[Step]]) -> int:
    """Returns the bytes of pinned host memory that a plan takes, in the step in which it takes most.

    Args:
        policies: The plan's, in their order.
        steps_before: Returns the steps under the plan's first policies; the first is the one that it was chosen on.

    Raises:
        PolicyError: A policy that takes host memory does not fit the first step.
    """
    total: dict[int, int] = {}
    options = (each.options() for each in policies if isinstance(each, Allocator))
    settings = ",".join(f"{key}:{value}" for each in options for key, value in each.items())
    for count, policy in enumerate(policies):
        if not policy.takes_host:
            continue
        try:
            before = steps_before(tuple(policies[:count]))
        except PolicyError:  # only a dry run of the whole plan shows it; state has the size that was recorded
            before = steps_before(())
        for number, recorded in enumerate(before):
            step = replace(recorded, allocator_settings=f"{recorded.allocator_settings},{settings}")
            try:
                total[number] = total.get(number, 0) + policy.host_bytes(step)
            except PolicyError:  # it leaves another step unchanged
                if number == 0:
                    raise
    return max(total.values(), default=0)


def transform_all(policy: Policy, steps: Sequence[Step], *, at_most: bool = False) -> tuple[Step, ...]:
    """Rewrites several steps of a job through one policy.

    Args:
        policy: The policy.
        steps: The steps; the first is the one that the plan was chosen on.
        at_most: Make worst-case assumptions for data missing from the recording.

    Raises:
        PolicyError: The policy does not fit the first step.
    """
    lead, *others = steps
    transform = policy.transform_at_most if at_most else policy.transform
    made = transform(lead)
    steps_made = [made]
    for step in others:
        try:
            steps_made.append(transform(step))
        except PolicyError:
            # It leaves the step unchanged, as in a real run: a loss on logits that are small in it, or checkpointing in
            # a step that only evaluates, which also lacks the state that the policy frees after an update.
            trains = np.isin(step.ops.phase, ("backward", "optimizer")).any()
            steps_made.append(step if trains else _without(step, _bytes_at_end(lead) - _bytes_at_end(made)))
    return tuple(steps_made)


def _bytes_at_end(step: Step) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns the bytes of each category in _KEPT that are live at the end of a step."""
    storages = step.storages
    stays = storages.freed_op_id == NONE
    return np.array([storages.allocated_bytes[stays & (storages.category == name)].sum() for name in _KEPT], np.int64)


def _without(step: Step, sizes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Step:
    """Returns a step that begins with ``sizes`` fewer bytes of each category in _KEPT."""
    storages = step.storages
    kept = storages.allocated_bytes.copy()
    for name, size in zip(_KEPT, sizes.tolist(), strict=True):
        rows = np.flatnonzero((storages.category == name) & (storages.created_op_id == NONE))
        rows = rows[np.argsort(-kept[rows], kind="stable")]
        before = np.cumsum(kept[rows]) - kept[rows]
        kept[rows] -= np.clip(max(size, 0) - before, 0, kept[rows])
    return replace(step, storages=storages.replace(allocated_bytes=kept), memory=Memory.empty())
