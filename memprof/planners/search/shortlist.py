"""Which plan to try next, given the runs so far."""

from __future__ import annotations

import dataclasses

from memprof.planners.search.candidate import Candidate
from memprof.planners.search.explore import SearchRequest, SearchResult
from memprof.planners.search.learned import kinds_of
from memprof.planners.search.workbench import rank
from memprof.policies.base import Policy


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
        """Returns the fastest remaining plan; None if there is none."""
        left = [one for one in self._plans.values() if self._may_fit(one)]
        return min(left, key=rank, default=None)

    def note_verified(self, one: Candidate) -> None:
        """Records that a plan was measured to fit."""
        self._tried.add(one.policies)
        self._verified.append(set(kinds_of(one.policies)))

    def note_above(self, one: Candidate, measured_bytes: int) -> None:
        """Records that a plan exceeds the budget."""
        self._tried.add(one.policies)
        learned = self.search_request.learned.with_error(one.policies, measured_bytes - one.peak_bytes)
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
