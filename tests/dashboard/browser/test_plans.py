"""The what-if and diff pages in a browser: search, choose, download, come back; two recordings side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof.policies.plan.plan_file import read_plan
from memprof_dashboard.pages import PAGES
from tests.building import Module, Op, Storage, make_tables
from tests.dashboard.browser.conftest import SAMPLES, Served, Shown
from tests.dashboard.browser.test_states import HOSTILE, write

Show = Callable[..., Shown]
Serve = Callable[..., Served]


def _search(shown: Shown, budget: str) -> None:
    """Searches with checkpointing alone, which takes a moment."""
    for name in ("precision", "accumulate", "loss", "swap", "optimizer"):
        shown.page.locator("#whatif-allow").get_by_label(name, exact=True).uncheck()
    shown.page.fill("#whatif-budget", budget)
    shown.page.click("#whatif-search")


def test_a_plan_is_searched_chosen_and_downloaded(show: Show, serve: Serve, tmp_path: Path) -> None:
    """From a budget to plan.toml: the front is drawn, a row or a point chooses a plan, the file reads back as it."""
    served = serve(*(SAMPLES / name / "run.memprof" for name in ("gpt", "lstm")))  # nobody has searched there
    shown = show(served, "tab=whatif")
    shown.wait_text("#panel", "No search run yet")
    _search(shown, "80%")
    shown.page.wait_for_selector("#whatif-pareto .points path", state="attached")
    shown.wait_view(budget="80%")
    shown.wait_text("#whatif-result", "Plans that fit")
    shown.page.locator("#whatif-result").get_by_role("button", name="checkpoint").first.click()
    shown.wait_text("#whatif-detail h3", "checkpoint")
    shown.page.wait_for_selector("#whatif-step .scatterlayer .trace", state="attached")
    before = shown.page.inner_text("#whatif-detail h3")
    # The leftmost point of the front is the plan of the least peak; on a busy machine the front may be that one plan.
    points = "document.querySelectorAll('#whatif-pareto .trace.scatter')[1].querySelectorAll('.point')"
    is_alone = shown.page.evaluate(f"() => {points}.length") == 1
    for _ in range(5):  # the page may move between the look and the click
        at: Any = shown.page.evaluate(
            f"() => {{ const point = {points}[0];"
            " const box = point.getBoundingClientRect(); window.scrollTo(0, scrollY + box.top - 300);"
            " const now = point.getBoundingClientRect(); return [now.x + now.width / 2, now.y + now.height / 2]; }"
        )
        shown.page.mouse.move(*at)
        shown.page.mouse.click(*at)
        shown.page.wait_for_timeout(1500)
        if is_alone or shown.page.inner_text("#whatif-detail h3") != before:
            break
    assert is_alone or shown.page.inner_text("#whatif-detail h3") != before
    chosen = shown.page.inner_text("#whatif-detail h3")
    with shown.page.expect_download() as waiting:
        shown.page.click("#whatif-save")
    assert waiting.value.suggested_filename == "plan.toml"
    waiting.value.save_as(tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml").describe() == chosen
    shown.wait_text("#whatif-detail", "memprof record --plan plan.toml train.py")
    shown.page.set_viewport_size({"width": 1024, "height": 768})
    table = "document.querySelector('#whatif-detail .table')"
    shown.page.wait_for_function(f"{table}.scrollWidth <= {table}.clientWidth")  # no column of it is cut


@pytest.mark.slow
def test_coming_back_shows_what_was_found(look: Show, gpt: Served) -> None:
    """A search outlives the page: another tab and back, and its result is there without searching again."""
    shown = look(gpt, "tab=whatif&budget=70%25")
    shown.page.wait_for_function("() => document.querySelector('#whatif-budget')?.value === '70%'")
    _search(shown, "70%")
    verdict = "Within 62.24 MiB: checkpoint"
    shown.wait_text("#whatif-result .verdict", verdict)
    shown.page.locator("#tabs").get_by_text(PAGES["blocks"].TITLE, exact=True).click()
    shown.page.wait_for_selector("#whatif-result", state="detached")
    shown.page.locator("#tabs").get_by_text(PAGES["whatif"].TITLE, exact=True).click()
    shown.wait_text("#whatif-result .verdict", verdict)


def test_a_budget_that_makes_no_sense_gets_a_sentence(look: Show, gpt: Served) -> None:
    """Nothing is searched, and the reason stands under the field."""
    shown = look(gpt, "tab=whatif")
    shown.page.fill("#whatif-budget", "lots")
    shown.page.press("#whatif-budget", "Enter")
    shown.wait_text("#whatif-mistake", "'lots' is not a size")


def test_hostile_modules_in_plans_are_text(show: Show, serve: Serve, tmp_path: Path) -> None:
    """Plans name modules: markup in a name stays text in tables, plots and sentences."""
    evil = HOSTILE[0].replace(".", "\u2024")  # a dot would part the name
    ops = [
        Op("aten.mm.default", module=evil, makes=["y", "z"], reads=["w"], saves=["y"]),
        Op("aten.mm.default", "backward", module=evil, makes=["g"], reads=["y"], frees=["y", "z"], forward=0),
    ]
    storages = [Storage(name, 4096, "activation", module=evil) for name in "yz"]
    storages += [Storage("w", 1024, "parameter", module=evil), Storage("g", 1024, "gradient", module=evil)]
    tables = make_tables([ops], storages, [Module("", "Model"), Module(evil)])
    shown = show(serve(write(tmp_path / "hostile.memprof", tables)), "tab=whatif")
    _search(shown, "90%")
    shown.wait_text("#whatif-result", "plans replayed")
    shown.wait_text("#whatif-result", evil[:10])
    assert shown.page.title() == "memprof"
    assert shown.page.evaluate("() => document.querySelectorAll('#panel img, #panel script').length") == 0
