"""Replaces the modelled steps of a policy by those of a dry run under it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import numpy as np

from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.suggest import Suggestion
from memprof.policies.base import Policy
from memprof.policies.plan.inputs import ran_on
from memprof.policies.plan.several_steps import transform_all
from memprof.replay.within import fullest_of
from memprof.trace.schema import Floats, Memory
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.trace.whole_steps import require_whole_step


def policies_to_dry_run(found: Suggestion, most: int) -> tuple[Policy, ...]:
    """Returns the policies whose steps are better taken from a dry run, in the order in which they are needed.

    These are at the beginning of plans that fit, or of faster ones that are predicted not to.

    Args:
        found: A search result.
        most: Number of the plans that fit that will be checked.
    """
    fastest_us = min((one.step_time_us for one in found.plans), default=float("inf"))
    plans = (*found.plans[:most], *(one for one in found.others if one.step_time_us < fastest_us))
    first = [one.policies[0] for one in plans if one.policies and one.policies[0].is_best_dry_run]
    return tuple(policy for policy in dict.fromkeys(first) if (policy,) not in found.basis.dry_steps)


def steps_of_dry_run(policy: Policy, basis: Basis, trace: Trace) -> tuple[Step, ...] | None:
    """Returns the steps of a dry run under a policy, in place of those that its model predicts.

    Their sizes and lives are the dry run's. Their operators have the modelled times: a dry run computes nothing.

    Args:
        policy: The policy that the job was dry-run under.
        basis: The steps as recorded.
        trace: The dry run.

    Returns:
        A step for each of the basis; None if the dry run has none on the same inputs.

    Raises:
        BadInputError: The dry run recorded no operators.
        InconclusiveError: It contains no complete step.
        PolicyError: The policy does not apply to the recorded step.
    """
    modelled = transform_all(policy, (basis.step, *basis.others))
    found = matching_steps(basis, trace)
    if found is None:
        return None
    return tuple(as_recorded(step, before, _times(step, before)) for step, before in zip(found, modelled, strict=True))


def matching_steps(basis: Basis, trace: Trace) -> tuple[Step, ...] | None:
    """Returns the steps of a dry run on the same inputs as those of a basis; None if one is missing.

    Args:
        basis: The steps as recorded.
        trace: The dry run.

    Raises:
        BadInputError: The dry run recorded no operators.
        InconclusiveError: It contains no complete step.
    """
    require_whole_step(trace)
    recorded = (basis.step, *basis.others)
    inputs = {step: ran_on(step) for step in map(trace.step, trace.step_peaks())}
    numbers = {step.number for step in recorded}
    found = []
    for before in recorded:
        same = [step for step, shapes in inputs.items() if shapes == ran_on(before)]
        # Recorded steps that the basis leaves out run the same operators; a dry run of other steps may have numbers
        # that stand for something else.
        close = [step for step in same if step.number == before.number or step.number not in numbers] or same
        if not close:
            return None
        found.append(fullest_of(close))
    return tuple(found)


def as_recorded(step: Step, recorded: Step, durations: Floats) -> Step:
    """Returns a dry-run step with what only a recording contains, and with other operator times.

    Args:
        step: The step.
        recorded: A step of the recording.
        durations: Times of the operators of ``step`` in microseconds, shape ``(ops,)``.
    """
    return dataclasses.replace(
        recorded,
        modules=step.modules,
        module_calls=step.module_calls,
        stacks=step.stacks,
        ops=step.ops.replace(duration_us=durations),
        storages=step.storages,
        uses=step.uses,
        saved=step.saved,
        memory=Memory.empty(),
        first_op_id=step.first_op_id,
        storage_ids=step.storage_ids,
        trained_modules=step.trained_modules,
    )


def _times(step: Step, modelled: Step) -> Floats:
    """Returns the times that the same operators have in the modelled step, shape ``(ops,)``; 0 for others."""
    known = dict(zip(_operators(modelled), modelled.ops.duration_us.tolist(), strict=True))
    return np.array([known.get(operator, 0.0) for operator in _operators(step)], np.float64)


def _operators(step: Step) -> Iterator[tuple[str, str, str, int]]:
    """Yields each operator's name, phase and module, and its number among those that share them."""
    ops, names = step.ops, step.modules.name
    count: Counter[tuple[str, str, str]] = Counter()
    for name, phase, module_id in zip(ops.name.tolist(), ops.phase.tolist(), ops.module_id.tolist(), strict=True):
        key = (name, phase, str(names[module_id]) if module_id >= 0 else "")
        count[key] += 1
        yield (*key, count[key])
