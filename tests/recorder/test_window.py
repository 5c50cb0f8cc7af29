"""How each step is observed."""

from __future__ import annotations

import pytest

from memprof.recorder.steps.window import Window


def watches(window: Window, count: int) -> list[str]:
    return [window.watch(step).value for step in range(count)]


def test_two_steps_pass_and_three_are_recorded() -> None:
    """By default; then one is timed, one left alone, and the rest of the job runs on unobserved."""
    expected = ["warm_up", "warm_up", "recorded", "recorded", "recorded", "timed", "plain", "closed", "closed"]
    assert watches(Window(), 9) == expected


def test_the_first_step_can_be_recorded() -> None:
    """A window that skips nothing begins with the job."""
    assert watches(Window(skip=0, steps=1), 4) == ["recorded", "timed", "plain", "closed"]


def test_a_long_way_to_the_window_is_not_recorded() -> None:
    """Only as many warm-up steps are recorded as the window has, in case the job ends early; the rest is skipped."""
    expected = ["warm_up", "warm_up", "skipped", "skipped", "skipped", "recorded", "recorded", "timed", "plain"]
    assert watches(Window(skip=5, steps=2), 9) == expected


@pytest.mark.parametrize(("skip", "steps"), [(-1, 1), (0, 0), (2, -3)])
def test_a_window_without_steps_is_refused(skip: int, steps: int) -> None:
    """With a message that contains both numbers."""
    with pytest.raises(ValueError, match=f"invalid window: skip={skip}, steps={steps};"):
        Window(skip, steps)
