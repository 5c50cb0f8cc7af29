"""The plans to try in turn; searches again once runs or dry runs have ruled out the results of a search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from memprof.planners.search.candidate import Candidate, kinds_of
from memprof.planners.search.request import SearchRequest, SearchResult
from memprof.planners.search.workbench import rank, shortest
from memprof.policies.base import Policy


class PlanQueue:
    """Plans predicted to fit, minus those that runs have ruled out; refills itself by searches, none of them repeated.

    A run above the budget measures the prediction error of its policies: from then on, plans with those policies are
    tried only if their prediction leaves that much headroom. A plan that failed to apply rules out all plans that
    contain its policies. A verified plan rules out those with the same policies and more, and ends the searches.
    """

    def __init__(self, first: SearchResult, search: Callable[[SearchRequest], SearchResult]) -> None:
        self._request = first.search_request
        self._searched = {first.search_request}
        self._search = search
        self._plans: dict[tuple[Policy, ...], Candidate] = {}
        self._tried: set[tuple[Policy, ...]] = set()
        self._refused: list[tuple[Policy, ...]] = []
        self._verified: list[set[str]] = []
        self._add(first)

    def next(self) -> Candidate | None:
        """Returns the shortest of the fastest remaining plans; None if no search yields one."""
        while not (left := [one for one in self._plans.values() if self._may_fit(one)]):
            if self._verified or not self._search_tighter():
                return None
        return shortest(sorted(left, key=rank))

    def note_verified(self, one: Candidate) -> None:
        """Records that a plan was measured to fit."""
        self._tried.add(one.policies)
        self._verified.append(set(kinds_of(one.policies)))

    def note_above(self, one: Candidate, measured_bytes: int, *, is_reserved: bool = False) -> None:
        """Records that a plan exceeds the budget, and searches for plans with that much headroom.

        Args:
            one: The plan.
            measured_bytes: What it took.
            is_reserved: Whether that is what the allocator reserved for tensors as predicted: expected of all plans.
        """
        self._tried.add(one.policies)
        policies = () if is_reserved else one.policies
        learned = self._request.learned.with_error(policies, measured_bytes - one.peak_bytes)
        self._request = dataclasses.replace(self._request, learned=learned)
        self._search_tighter()

    def note_refused(self, one: Candidate) -> None:
        """Records that a plan cannot be applied to the job, or that the job failed under it."""
        self._tried.add(one.policies)
        self._refused.append(one.policies)

    def _add(self, answer: SearchResult) -> None:
        for one in answer.fitting:
            self._plans.setdefault(one.policies, one)

    def _search_tighter(self) -> bool:
        """Searches with the measured errors and without refused policies; returns False where that was done before."""
        refused = {
            policy.name
            for policies in self._refused
            # Other modules may work where some did not, unless the policy has no choice of modules.
            for policy in policies
            if not hasattr(policy, "modules")
        }
        tighter = dataclasses.replace(self._request, forbid=tuple(sorted({*self._request.forbid, *refused})))
        if tighter in self._searched:
            return False
        self._searched.add(tighter)
        self._add(self._search(tighter))
        return True

    def _may_fit(self, one: Candidate) -> bool:
        return (
            bool(one.policies)
            and one.policies not in self._tried
            and self._request.needed(one) <= self._request.budget_bytes
            and not any(set(map(_kind, refused)) <= set(map(_kind, one.policies)) for refused in self._refused)
            and not any(verified <= set(kinds_of(one.policies)) for verified in self._verified)
        )


def _kind(policy: Policy) -> str:
    """Returns the key shared by policies that a job refuses for the same reason."""
    return policy.describe() if hasattr(policy, "modules") else kinds_of((policy,))[0]
