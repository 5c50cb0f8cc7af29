"""Prediction errors measured in runs of a job, and their use in a search."""

from __future__ import annotations

import dataclasses

from memprof.planners.search.candidate import SeenErrors, kinds_of
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.precision.policy import Precision
from memprof.policies.swap.policy import Swap
from tests.policies.faces import recorded

BF16, BLOCKS, STATE = Precision("bf16"), Checkpoint(("layers.0",)), Swap(what="optimizer", to="disk")


def test_an_error_is_expected_of_every_plan_that_has_the_policies() -> None:
    """Of other modules and other numbers too, and of no plan that lacks one of them."""
    known = SeenErrors().with_error([BF16], 10).with_error([BF16, BLOCKS], 30).with_error([BF16], 8)
    assert known.expected([BF16]) == 10
    assert known.expected([BF16, STATE]) == 10
    assert known.expected([BF16, Checkpoint(("layers.1",)), STATE]) == 30
    assert known.expected([BLOCKS, STATE]) == 0
    assert kinds_of([Accumulate(2)]) == kinds_of([Accumulate(4)])


def test_a_search_leaves_room_where_the_error_was_seen_and_nowhere_else() -> None:
    """At a budget that bf16 just meets it is not found any more once it took more; what swaps is found as before."""
    step = recorded("shared")
    search_request = SearchRequest(10**12, allow=("precision", "swap"), time_limit_s=60, is_checked=True)
    peak = explore(step, dataclasses.replace(search_request, budget_bytes=1)).recorded.peak_bytes
    search_request = dataclasses.replace(search_request, budget_bytes=int(0.75 * peak))
    before = explore(step, search_request)
    bf16 = next(one for one in before.fitting if any(isinstance(policy, Precision) for policy in one.policies))
    after = explore(
        step, dataclasses.replace(search_request, learned=SeenErrors().with_error([BF16], search_request.budget_bytes))
    )
    assert bf16.policies in {one.policies for one in before.fitting}
    assert not any(isinstance(policy, Precision) for one in after.fitting for policy in one.policies)
    swaps = explore(step, dataclasses.replace(search_request, forbid=("precision",)))
    assert {one.policies for one in swaps.fitting} & {one.policies for one in after.fitting}
