"""Shared state of the what-if page: a dashboard's searches, and the ids of their results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from memprof_dashboard.sources import Rank, Workspace
from memprof_dashboard.state import View

if TYPE_CHECKING:
    from memprof.analysis.plans.compare_planners import Point
    from memprof.analysis.plans.suggest import Suggestion
    from memprof.analysis.snapshot_plans.change import SnapshotPlans
    from memprof.planners.search.candidate import Candidate
    from memprof_dashboard.whatif.planning import Detail

#: Numbers of the searches that are over and shown, -1 for none; None until that is known.
FOUND = "whatif-found"
COMPARED = "whatif-compared"
#: What they fill.
RESULT = "whatif-result"
PLANNERS = "whatif-planners"
#: Type of the buttons that choose a plan.
ROW = "whatif-row"
#: Parts of a result.
CHOSEN, PARETO, DETAIL = "whatif-chosen", "whatif-pareto", "whatif-detail"
STEP, SAVE = "whatif-step", "whatif-save"

_MOST_DETAILS = 8


R = TypeVar("R")
P = TypeVar("P")

#: Maximum number of searches kept; running ones are never dropped.
_MOST_KEPT = 6


class Search(Generic[P, R]):
    """One search, from the moment it begins.

    Attributes:
        number: Unlike that of every other search.
        rank: The recording it is of.
        what: What was searched for, as it was typed.
        found: What was reported so far, in order.
    """

    def __init__(self, number: int, rank: Rank, what: str, work: Callable[[Callable[[P], None]], R]) -> None:
        """Begins it.

        Args:
            number: Unlike that of every other search.
            rank: The recording.
            what: What was searched for.
            work: Makes the result; it is given what to call with everything found on the way. That raises
                KeyboardInterrupt once the search is to stop.
        """
        self.number = number
        self.rank = rank
        self.what = what
        self.found: list[P] = []
        self._began = time.monotonic()
        self._is_stopped = threading.Event()
        self._result: Future[R] = Future()
        threading.Thread(target=self._run, args=(work,), name=f"memprof search {number}", daemon=True).start()

    @property
    def is_running(self) -> bool:
        """Whether it still runs."""
        return not self._result.done()

    @property
    def was_stopped(self) -> bool:
        """Whether it was stopped."""
        return self._is_stopped.is_set()

    @property
    def seconds(self) -> float:
        """How long ago it began."""
        return time.monotonic() - self._began

    def stop(self) -> None:
        """Requests a stop; the search ends with its results so far at the next one it reports."""
        self._is_stopped.set()

    def result(self, timeout_s: float | None = 0.0) -> R:
        """Returns the result.

        Args:
            timeout_s: How long to wait where it still runs; None for as long as it takes.

        Raises:
            TimeoutError: It still runs.
            Exception: The exception that ended it.
        """
        return self._result.result(timeout_s)

    def _run(self, work: Callable[[Callable[[P], None]], R]) -> None:
        try:
            result = work(self._report)
        except BaseException as error:  # noqa: BLE001 - re-raised by result()
            self._result.set_exception(error)
        else:
            self._result.set_result(result)

    def _report(self, one: P) -> None:
        self.found.append(one)
        # The first result is the unmodified job: a search needs it to return anything.
        if self._is_stopped.is_set() and len(self.found) > 1:
            raise KeyboardInterrupt


class Searches(Generic[P, R]):
    """The latest search of each key."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Search[P, R]] = {}
        self._count = 0
        self._lock = threading.Lock()

    def start(self, key: Hashable, rank: Rank, what: str, work: Callable[[Callable[[P], None]], R]) -> Search[P, R]:
        """Starts a search; stops and replaces the one of the same key."""
        with self._lock:
            before = self._by_key.pop(key, None)
            if before is not None:
                before.stop()
            done = [key for key, search in self._by_key.items() if not search.is_running]
            for old in done[: max(len(self._by_key) + 1 - _MOST_KEPT, 0)]:
                del self._by_key[old]
            self._count += 1
            self._by_key[key] = search = Search(self._count, rank, what, work)
            return search

    def latest(self, key: Hashable) -> Search[P, R] | None:
        """Returns the search of a key; None where it was dropped or never started."""
        return self._by_key.get(key)


PlanSearch: TypeAlias = "Search[Candidate, Suggestion | SnapshotPlans]"
PlannerSearch: TypeAlias = "Search[Point, tuple[Point, ...]]"


class PlanWorkspace:
    """The searches of a dashboard, and the cached details of plans."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.plans: Searches[Candidate, Suggestion | SnapshotPlans] = Searches()
        self.planners: Searches[Point, tuple[Point, ...]] = Searches()
        self._details: dict[tuple[int, int], Detail] = {}

    def of(self, place: Any) -> tuple[PlanSearch | None, PlannerSearch | None]:
        """Returns the latest searches of the recording at a place."""
        key = key_of(View.from_json(place))
        return self.plans.latest(key), self.planners.latest(key)

    def found(self, place: Any) -> tuple[PlanSearch, Suggestion] | None:
        """Returns the latest plan search with its result, where it is finished and not that of a snapshot."""
        from memprof.analysis.plans.suggest import Suggestion

        search = self.of(place)[0]
        found = None if search is None or search.is_running else search.result()
        return (search, found) if search is not None and isinstance(found, Suggestion) else None

    def detail(self, search: PlanSearch, found: Suggestion, chosen: int) -> Detail:
        """Returns a plan's step; the last few are cached."""
        from memprof_dashboard.whatif.planning import detail_of, plans_of

        key = (search.number, chosen)
        if key not in self._details:
            self._details = dict(list(self._details.items())[1 - _MOST_DETAILS :])
            self._details[key] = detail_of(search.rank, found, plans_of(found)[chosen])
        return self._details[key]


def key_of(view: View) -> tuple[int, int]:
    """Returns the cache key of a recording's searches: its index and rank."""
    return view.trace, view.rank
