"""Progress of long searches."""

from __future__ import annotations

import pytest

from memprof.cli import progress
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest
from memprof.replay.live import live_bytes
from tests.planners.promises import step_named


def test_a_long_search_in_a_pipe_says_what_is_best_so_far(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If stderr is not a terminal, it prints the number of plans, the fastest that fits and how to end the search."""
    monkeypatch.setattr(progress, "_FIRST_S", 0.0)
    monkeypatch.setattr(progress, "_NEXT_S", 0.0)
    step = step_named("gpt")
    request = SearchRequest(int(live_bytes(step).during.max()) * 7 // 10, allow=("checkpoint",))
    with progress.SearchBar(request) as bar:
        explore(step, request, bar.add)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "memprof: 1 plan replayed (Ctrl-C ends the search)"
    assert ", the fastest that fits takes " in lines[-1]


def test_a_short_search_in_a_pipe_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """What reads stderr finds warnings and errors only."""
    request = SearchRequest(1)
    with progress.SearchBar(request) as bar:
        bar.show("3 plans replayed")
    assert capfd.readouterr().err == ""
