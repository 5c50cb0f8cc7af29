"""Fixtures for tests of policies, most of which record jobs in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.policies.loops import Loop


@pytest.fixture
def loop(flag: str) -> Iterator[Callable[[], Loop]]:
    """Creates a loop under a plan, which is undone after the test."""
    made = []

    def make(*, applied: bool = True) -> Loop:
        one = Loop(flag)
        made.append(one)
        if applied:
            one.apply()
        return one

    yield make
    for one in made:
        if one.job is not None:
            one.job.undo()
