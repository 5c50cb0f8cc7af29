"""The plans to try in turn; searches again once runs or dry runs have ruled out the results of a search."""

from __future__ import annotations

from collections.abc import Callable

from memprof.planners.search.candidate import Candidate
from memprof.planners.search.explore import SearchRequest, SearchResult
from memprof.planners.search.shortlist import Shortlist


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

    def note_above(self, one: Candidate, measured_bytes: int) -> None:
        """Records that a plan exceeds the budget, and searches for plans with that much headroom."""
        self._shortlist.note_above(one, measured_bytes)
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
