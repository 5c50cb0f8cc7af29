"""Rejects policies that contradict each other on any model, for prediction and application alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from memprof.errors import PolicyError
from memprof.policies.base import Policy


def require_composable(policies: Sequence[Policy]) -> None:
    """Checks that no policy of a plan undoes what another needs.

    Args:
        policies: The policies of a plan, in their order.

    Raises:
        PolicyError: Two do; the message names both.
    """
    reason = contradiction(policies)
    if reason:
        raise PolicyError(reason)


def require_predictable(policies: Sequence[Policy]) -> None:
    """Checks that a plan can be applied, and that each policy can be predicted together with the others.

    Args:
        policies: The policies of a plan, in their order.

    Raises:
        PolicyError: Two contradict each other, or one was measured under another plan.
    """
    require_composable(policies)
    reason = next(filter(None, (policy.refusal_within(policies) for policy in policies)), "")
    if reason:
        raise PolicyError(reason)


def contradiction(policies: Sequence[Policy]) -> str:
    """Returns why policies cannot be combined on any model, a sentence that names two of them; "" where they can.

    Args:
        policies: The policies of a plan, in their order.
    """
    return next(filter(None, itertools.starmap(_of_pair, itertools.combinations(policies, 2))), "")


def _of_pair(first: Policy, second: Policy) -> str:
    updates_in_backward = bool(getattr(second, "in_backward", False))
    if updates_in_backward and first.name == "accumulate":
        return (
            "accumulate sums gradients over micro-batches, but step-in-backward uses each gradient as soon as it is "
            "complete: leave in_backward or accumulate out of the plan."
        )
    if updates_in_backward and first.name == "precision" and getattr(first, "dtype", "") == "fp16":
        return (
            "Loss scaling for fp16 checks gradients for overflow before the update, but step-in-backward has used them "
            "by then: write precision bf16, or leave in_backward out of the plan."
        )
    if getattr(first, "one_by_one", False) and (updates_in_backward or getattr(second, "state", "")):
        return (
            "swap updates one parameter at a time within step(), and the optimizer policy changes when or with which "
            "state it is updated: leave one_by_one, or in_backward and state, out of the plan."
        )
    if first.name == "compile" and second.name == "remat":
        return (
            "Operators that torch.compile has compiled are invisible to remat: leave one of the two out, or set a "
            "budget for the compiler itself with --compile."
        )
    return ""
