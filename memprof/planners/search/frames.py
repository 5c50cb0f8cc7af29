"""Combinations of the policy settings that concern the whole step."""

from __future__ import annotations

import itertools

from memprof.planners.search.workbench import Workbench
from memprof.policies.base import Policy
from memprof.policies.plan.plan import contradiction
from memprof.policies.registry import policy_types

#: Share of the step time within which combinations count as equally fast.
_ALIKE = 5e-3


def find_frames(bench: Workbench, allowed: set[str], *, world_size: int = 1) -> list[tuple[Policy, ...]]:
    """Combines the policies that apply to the step, each first tried alone.

    Args:
        bench: Replays plans; inapplicable ones stay there with the reason.
        allowed: Names of allowed policies.
        world_size: Number of ranks; shards are tried from two on.

    Returns:
        The combinations of policies that can be combined, the empty one among them; shortest steps first, by the sum of
        the policies' own times, and of about equal ones those of fewer policies.
    """
    alternatives = []
    for kind in policy_types():
        if kind.name in allowed:
            found = kind.candidates(bench.step, world_size=world_size)
            bench.refused |= {(policy,): reason for policy, reason in found.unsuitable.items()}
            alternatives.append([(), *((policy,) for policy in _fitting(bench, found.whole_step))])
    base = bench.archive[()].step_time_us
    single = [policy for options in alternatives for parts in options for policy in parts]
    extra = {policy: bench.archive[(policy,)].step_time_us - base for policy in single}
    products = (tuple(itertools.chain.from_iterable(parts)) for parts in itertools.product(*alternatives))
    frames = [frame for frame in products if not contradiction(frame)]
    alike = max(_ALIKE * base, 1e-9)
    return sorted(
        frames,
        key=lambda frame: (round((total := sum(extra[policy] for policy in frame)) / alike), len(frame), total),
    )


def _fitting(bench: Workbench, options: tuple[Policy, ...]) -> list[Policy]:
    """Tries each alone, and drops those that do not apply or change nothing."""
    base = bench.archive[()]
    found = [(option, bench.try_plan(option)) for option in options]
    # A policy that leaves the peak may help another; one that also leaves the step time is not worth combining.
    same = (base.peak_bytes, base.step_time_us)
    return [option for option, one in found if one is not None and (one.peak_bytes, one.step_time_us) != same]
