"""Shared state of the what-if page: a dashboard's searches, and the ids of their results."""

from __future__ import annotations

from typing import Any

from memprof.analysis.plans.compare_planners import Point
from memprof.analysis.plans.suggest import Suggestion
from memprof.planners.search.candidate import Candidate
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View
from memprof_dashboard.whatif.planning import Detail, detail_of, plans_of
from memprof_dashboard.whatif.searches import Search, Searches

#: Numbers of the searches that are over and shown, -1 for none; None until that is known.
FOUND = "whatif-found"
COMPARED = "whatif-compared"
#: What they fill.
RESULT = "whatif-result"
PLANNERS = "whatif-planners"

_MOST_DETAILS = 8

PlanSearch = Search[Candidate, Suggestion]
PlannerSearch = Search[Point, tuple[Point, ...]]


class PlanWorkspace:
    """The searches of a dashboard, and the cached details of plans."""

    def __init__(self, workspace: Workspace) -> None:
        """Starts without searches."""
        self.workspace = workspace
        self.plans: Searches[Candidate, Suggestion] = Searches()
        self.planners: Searches[Point, tuple[Point, ...]] = Searches()
        self._details: dict[tuple[int, int], Detail] = {}

    def of(self, place: Any) -> tuple[PlanSearch | None, PlannerSearch | None]:
        """Returns the latest searches of the recording at a place."""
        key = key_of(View.from_json(place))
        return self.plans.latest(key), self.planners.latest(key)

    def found(self, place: Any) -> tuple[PlanSearch, Suggestion] | None:
        """Returns the latest plan search with its result, where it is finished."""
        search = self.of(place)[0]
        return None if search is None or search.is_running else (search, search.result())

    def detail(self, search: PlanSearch, found: Suggestion, chosen: int) -> Detail:
        """Returns a plan's step; the last few are cached."""
        key = (search.number, chosen)
        if key not in self._details:
            self._details = dict(list(self._details.items())[1 - _MOST_DETAILS :])
            self._details[key] = detail_of(search.rank, found, plans_of(found)[chosen])
        return self._details[key]


def key_of(view: View) -> tuple[int, int]:
    """Returns the cache key of a recording's searches: its index and rank."""
    return view.trace, view.rank
