"""For every test of a policy, most of which record jobs in this process."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def many_jobs(small_heap: None) -> None:
    """Keeps what a recording costs down."""
