"""The plans to try in turn; searches again once runs or dry runs have ruled out the results of a search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from memprof.planners.search.candidate import Candidate, kinds_of
from memprof.planners.search.request import SearchRequest, SearchResult
from memprof.planners.search.workbench import rank, shortest
from memprof.policies.base import Policy


class PlanQueue:
    """A shortlist that refills itself.

    No search is repeated. Once a plan is verified, `next` starts no further search.
    """

    def __init__(self, first: SearchResult, search: Callable[[SearchRequest], SearchResult]) -> None:
        """Starts with the plans of a search.

        Args:
            first: The search result for the budget.
            search: Searches for more plans.
        """
        self._shortlist = Shortlist(first.search_request)
        self._shortlist.add(first)
        self._searched = {first.search_request}
        self._search = search
        self._has_verified = False

    def next(self) -> Candidate | None:
        """Returns the fastest remaining plan; None if no search yields one."""
        one = self._shortlist.next()
        while one is None and not self._has_verified and self._search_tighter():
            one = self._shortlist.next()
        return one

    def note_verified(self, one: Candidate) -> None:
        """Records that a plan was measured to fit."""
        self._has_verified = True
        self._shortlist.note_verified(one)

    def note_above(self, one: Candidate, measured_bytes: int, *, is_reserved: bool = False) -> None:
        """Records that a plan exceeds the budget, and searches for plans with that much headroom.

        Args:
            one: The plan.
            measured_bytes: What it took.
            is_reserved: Whether that is what the allocator reserved for tensors as predicted: expected of all plans.
        """
        self._shortlist.note_above(one, measured_bytes, is_reserved=is_reserved)
        self._search_tighter()

    def note_refused(self, one: Candidate) -> None:
        """Records that a plan cannot be applied to the job, or that the job failed under it."""
        self._shortlist.note_refused(one)

    def _search_tighter(self) -> bool:
        """Runs the next search that has not been run yet; returns whether there was one."""
        tighter = self._shortlist.tightened(self._searched)
        if tighter is None:
            return False
        self._searched.add(tighter)
        self._shortlist.add(self._search(tighter))
        return True


class Shortlist:
    """Plans predicted to fit, minus those that runs have ruled out.

    A run above the budget measures the prediction error of its policies: from then on, plans with those policies are
    tried only if their prediction leaves that much headroom. A plan that failed to apply rules out all plans that
    contain its policies. A verified plan rules out those with the same policies and more.
    """

    def __init__(self, search_request: SearchRequest) -> None:
        """Starts without plans.

        Args:
            search_request: The search request.
        """
        self.search_request = search_request
        self._plans: dict[tuple[Policy, ...], Candidate] = {}
        self._tried: set[tuple[Policy, ...]] = set()
        self._refused: list[tuple[Policy, ...]] = []
        self._verified: list[set[str]] = []

    def add(self, answer: SearchResult) -> None:
        """Adds the plans of a search."""
        for one in answer.fitting:
            self._plans.setdefault(one.policies, one)

    def next(self) -> Candidate | None:
        """Returns the shortest of the fastest remaining plans; None if there is none."""
        left = [one for one in self._plans.values() if self._may_fit(one)]
        return shortest(sorted(left, key=rank)) if left else None

    def note_verified(self, one: Candidate) -> None:
        """Records that a plan was measured to fit."""
        self._tried.add(one.policies)
        self._verified.append(set(kinds_of(one.policies)))

    def note_above(self, one: Candidate, measured_bytes: int, *, is_reserved: bool) -> None:
        """Records that a plan exceeds the budget; arguments are those of ``PlanQueue.note_above``."""
        self._tried.add(one.policies)
        policies = () if is_reserved else one.policies
        learned = self.search_request.learned.with_error(policies, measured_bytes - one.peak_bytes)
        self.search_request = dataclasses.replace(self.search_request, learned=learned)

    def note_refused(self, one: Candidate) -> None:
        """Records that a plan cannot be applied to the job, or that the job failed under it."""
        self._tried.add(one.policies)
        self._refused.append(one.policies)

    def tightened(self, searched: set[SearchRequest]) -> SearchRequest | None:
        """Returns the next search request: with the measured errors, and without refused policies.

        Args:
            searched: Requests that were searched already.

        Returns:
            The request; None if no new search can help.
        """
        refused = {
            policy.name
            for policies in self._refused
            # Other modules may work where some did not, unless the policy has no choice of modules.
            for policy in policies
            if not hasattr(policy, "modules")
        }
        forbid = tuple(sorted({*self.search_request.forbid, *refused}))
        tighter = dataclasses.replace(self.search_request, forbid=forbid)
        return None if tighter in searched else tighter

    def _may_fit(self, one: Candidate) -> bool:
        return (
            bool(one.policies)
            and one.policies not in self._tried
            and self.search_request.needed(one) <= self.search_request.budget_bytes
            and not any(_holds(one.policies, refused) for refused in self._refused)
            and not any(verified <= set(kinds_of(one.policies)) for verified in self._verified)
        )


def _holds(policies: tuple[Policy, ...], others: tuple[Policy, ...]) -> bool:
    """Returns whether a plan contains all of some policies, up to their parameters."""
    return {_kind(policy) for policy in others} <= {_kind(policy) for policy in policies}


def _kind(policy: Policy) -> str:
    """Returns the key shared by policies that a job refuses for the same reason."""
    return policy.describe() if hasattr(policy, "modules") else kinds_of((policy,))[0]
