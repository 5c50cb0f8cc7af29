"""The plans to try one after another; where runs have ruled out what a search found, it searches for more."""

from __future__ import annotations

from collections.abc import Callable

from memprof.launch.fit.shortlist import Shortlist
from memprof.planners.search.explore import SearchRequest, SearchResult
from memprof.planners.search.tried import Candidate


class Candidates:
    """A shortlist that fills itself.

    Nothing is searched for twice. A plan that was verified is the answer: once there is one, `next` searches no more.
    """

    def __init__(self, first: SearchResult, search: Callable[[SearchRequest], SearchResult]) -> None:
        """Begins with the plans of a search.

        Args:
            first: What was found for the budget.
            search: Searches for more.
        """
        self._shortlist = Shortlist(first.search_request)
        self._shortlist.add(first)
        self._searched = {first.search_request}
        self._search = search
        self._has_verified = False

    def next(self) -> Candidate | None:
        """Returns the fastest plan that is left, None where no search brings one."""
        one = self._shortlist.next()
        while one is None and not self._has_verified and self._search_tighter():
            one = self._shortlist.next()
        return one

    def note_verified(self, one: Candidate) -> None:
        """Learns that a plan was measured to fit."""
        self._has_verified = True
        self._shortlist.note_verified(one)

    def note_above(self, one: Candidate, measured_bytes: int) -> None:
        """Learns that a plan needs more than the budget, and searches for plans that leave as much room."""
        self._shortlist.note_above(one, measured_bytes)
        self._search_tighter()

    def note_refused(self, one: Candidate) -> None:
        """Learns that a plan cannot be applied to the job, or that the job failed under it."""
        self._shortlist.note_refused(one)

    def _search_tighter(self) -> bool:
        """Searches for what was not searched for yet; returns whether there was anything."""
        tighter = self._shortlist.tightened(self._searched)
        if tighter is None:
            return False
        self._searched.add(tighter)
        self._shortlist.add(self._search(tighter))
        return True
