"""Which plan to try next, given what the runs so far have shown."""

from __future__ import annotations

import dataclasses

from memprof.planners.search.explore import SearchRequest, SearchResult
from memprof.planners.search.learned import kinds_of
from memprof.planners.search.tried import Candidate
from memprof.planners.search.workbench import rank
from memprof.policies.base import Policy


class Shortlist:
    """Plans that are predicted to fit, less those that runs have ruled out.

    A run above the budget says by how much the prediction of its policies errs: of plans that have them, only those
    whose prediction leaves as much room are tried from then on. A plan that the job did not take rules out those that
    hold all of its policies. A plan that was verified rules out those that do the same and more.
    """

    def __init__(self, search_request: SearchRequest) -> None:
        """Begins without plans.

        Args:
            search_request: What is asked for.
        """
        self.search_request = search_request
        self._plans: dict[tuple[Policy, ...], Candidate] = {}
        self._tried: set[tuple[Policy, ...]] = set()
        self._refused: list[tuple[Policy, ...]] = []
        self._verified: list[set[str]] = []

    def add(self, answer: SearchResult) -> None:
        """Takes the plans of a search."""
        for one in answer.fitting:
            self._plans.setdefault(one.policies, one)

    def next(self) -> Candidate | None:
        """Returns the fastest plan that is left, None where none is."""
        left = [one for one in self._plans.values() if self._may_fit(one)]
        return min(left, key=rank, default=None)

    def note_verified(self, one: Candidate) -> None:
        """Learns that a plan was measured to fit."""
        self._tried.add(one.policies)
        self._verified.append(set(kinds_of(one.policies)))

    def note_above(self, one: Candidate, measured_bytes: int) -> None:
        """Learns that a plan needs more than the budget."""
        self._tried.add(one.policies)
        learned = self.search_request.learned.with_error(one.policies, measured_bytes - one.peak_bytes)
        self.search_request = dataclasses.replace(self.search_request, learned=learned)

    def note_refused(self, one: Candidate) -> None:
        """Learns that a plan cannot be applied to the job, or that the job failed under it."""
        self._tried.add(one.policies)
        self._refused.append(one.policies)

    def tightened(self, searched: set[SearchRequest]) -> SearchRequest | None:
        """Returns what to search for next: with what was learned about errors, and without what was refused.

        Args:
            searched: What was searched for already.

        Returns:
            The request, None where a search can bring nothing new.
        """
        refused = {
            policy.name
            for policies in self._refused
            # Other modules may do where some did not, unless the policy was to blame for more than its modules.
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
    """Tells whether a plan holds all of some policies, or the like with other numbers."""
    return {_kind(policy) for policy in others} <= {_kind(policy) for policy in policies}


def _kind(policy: Policy) -> str:
    """Returns what a policy has in common with those that a job refuses for the same reason."""
    return policy.describe() if hasattr(policy, "modules") else kinds_of((policy,))[0]
