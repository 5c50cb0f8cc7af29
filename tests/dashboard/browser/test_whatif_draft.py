"""A plan that is ticked in the browser, a run that appears, and the table of live tensors as it is scrolled."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from memprof.policies.plan.plan_file import read_plan
from tests.building import Op, Storage, make_tables
from tests.dashboard.browser.conftest import SAMPLES, Served, Shown
from tests.dashboard.browser.test_states import write
from tests.dashboard.test_two_recordings import write_run_under_plan

Look = Callable[..., Shown]


def test_ticks_redraw_the_timeline_and_save_the_plan(look: Look, gpt: Served, tmp_path: Path) -> None:
    """A tick draws the predicted step; the button saves the plan and copies the command; Clear takes the line away."""
    shown = look(gpt, "tab=whatif")
    shown.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    assert "with the plan" not in shown.figure()["lines"]
    shown.page.locator(".chips").get_by_label("precision bf16").check()
    shown.wait_view(plan="precision bf16")
    shown.wait_text("#draft-result", "peak allocated")
    shown.wait_idle()
    assert "with the plan" in shown.figure()["lines"]
    with shown.page.expect_download() as waiting:
        shown.page.click("#draft-save")
    waiting.value.save_as(tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml").describe() == "precision bf16"
    assert shown.page.evaluate("navigator.clipboard.readText()") == "memprof record --plan plan.toml train.py"
    shown.page.click("#draft-clear")
    shown.page.wait_for_function("() => !new URLSearchParams(location.search).has('plan')")
    shown.wait_idle()
    assert "with the plan" not in shown.figure()["lines"]
    shown.page.go_back()
    shown.wait_view(plan="precision bf16")
    shown.wait_idle()
    assert shown.page.locator(".chips").get_by_label("precision bf16").is_checked()


@pytest.mark.slow
def test_a_run_that_appears_is_compared_by_itself(show: Look, serve: Callable[..., Served], tmp_path: Path) -> None:
    """Its name, its error and its timeline are there without a click."""
    own = Path(shutil.copy(SAMPLES / "gpt" / "run.memprof", tmp_path / "run.memprof"))
    shown = show(serve(own), "tab=whatif")
    assert shown.page.locator("#other").is_hidden()
    write_run_under_plan(tmp_path / "fits.memprof")
    shown.wait_text("#note", "New run fits.memprof: predicted peak 37.69 MiB, measured 37.69 MiB: exact")
    shown.wait_view(other=1)
    shown.wait_text("#whatif-runs", "Verified runs")
    shown.page.wait_for_selector("#timeline-other .main-svg .scatterlayer .trace", state="attached")
    shown.page.locator("#lay label", has_text="over").click()
    shown.wait_view(lay="over")
    shown.wait_idle()
    assert "fits.memprof" in shown.figure()["lines"]


@pytest.mark.slow
def test_the_table_is_fetched_as_it_is_scrolled(show: Look, serve: Callable[..., Served], tmp_path: Path) -> None:
    """Every row comes once, in order; a click on a head sorts all of them, also those that were not fetched yet."""
    storages = [Storage(f"s{number:03}", 8 * (number + 1), name=f"w{number:03}") for number in range(250)]
    tables = make_tables([[Op(makes=[storage.key for storage in storages])]], storages)
    shown = show(serve(write(tmp_path / "many.memprof", tables)))
    names = "() => Array.from(document.querySelectorAll('.side-table tbody td button'), (one) => one.textContent)"
    assert len(shown.page.evaluate(names)) == 80
    for count in (160, 240, 250):
        shown.page.evaluate("document.querySelector('.side-table').scrollTop = 1e9")
        shown.page.wait_for_function(f"() => document.querySelectorAll('.side-table tbody tr').length === {count}")
    assert shown.page.evaluate(names) == [f"w{number:03}" for number in reversed(range(250))]
    shown.go(find="w1")
    shown.page.wait_for_function("() => document.querySelectorAll('.side-table tbody tr').length === 80")
    shown.page.locator(".side-table th button").first.click()  # from the largest down, which they are
    shown.page.locator(".side-table th button").first.click()
    shown.page.wait_for_function("() => document.querySelector('.side-table tbody td button').textContent === 'w100'")
