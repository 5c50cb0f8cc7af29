"""What all tests of planners share."""

from __future__ import annotations

import pytest

from memprof.planners.published.auto import Auto


@pytest.fixture(autouse=True)
def few_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the search of ``auto`` when every part has run, rather than when no time is left."""
    monkeypatch.setattr(Auto, "most_moves", 0)
