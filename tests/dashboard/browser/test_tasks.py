"""Five questions of users, answered on the page by clicks and keys; names and roles of its controls."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from memprof.trace.schema import NONE
from memprof_dashboard.pages import PAGES
from tests.building import Module, Op, Storage, make_tables
from tests.dashboard.browser.conftest import Served, Shown
from tests.dashboard.browser.test_states import write

Look = Callable[..., Shown]


def test_why_and_which_layer(look: Look, gpt: Served) -> None:
    """The first screen holds the answer: sentence, largest part, and the largest tensors; nothing is scrolled."""
    shown = look(gpt, viewport={"width": 1440, "height": 900})
    shown.wait_text("#facts h1", "Peaks at 88.92 MiB in forward of step 4")
    shown.wait_text("#facts", "85% activations")
    shown.wait_text("#live-table tbody tr", "layers.0-3.mlp.0")
    assert "train.py:51" in shown.page.locator("#live-table tbody tr").first.inner_text()
    for part in ("#facts h1", "#timeline", "#live-table tbody tr", ".next .main"):
        box = shown.page.locator(part).first.bounding_box()
        assert box["y"] + box["height"] <= 900, part
    shown.page.keyboard.press("m")
    shown.wait_view(side="treemap")
    shown.page.wait_for_selector("#boxes-graph .treemap", state="attached")
    shown.page.locator(".segmented label", has_text=re.compile("^stack$")).click()
    shown.wait_view(side="treemap", by="stack")


def test_what_would_make_it_fit(look: Look, gpt: Served) -> None:
    """A budget and one click: the search runs with it, and its sentence is there."""
    shown = look(gpt, viewport={"width": 1440, "height": 900})
    shown.page.fill("#budget", "80%")
    shown.page.keyboard.press("Enter")
    shown.wait_text("#facts h1", "Over the budget by")
    shown.page.get_by_role("button", name="Find a plan that fits").click()
    shown.wait_text("#whatif-result .verdict", "Within 71.13 MiB")
    shown.page.get_by_label("swap", exact=True).uncheck()
    shown.wait_text("#whatif-stale", "searched for 80%, before the settings changed")
    shown.page.get_by_label("swap", exact=True).check()
    shown.page.wait_for_function("() => !document.querySelector('#whatif-stale').textContent")


def test_what_changed(look: Look, two: Served) -> None:
    """With two open recordings, one click shows the comparison; both sides can be swapped."""
    shown = look(two)
    shown.page.get_by_role("button", name="Compare with").click()
    shown.wait_view(tab="diff", other=1)
    shown.wait_text(".next", "What changed")
    shown.page.click("#swap-button")
    shown.wait_view(trace=1)
    assert shown.view.other == 0


def test_what_leaks(show: Look, serve: Callable[..., Served], tmp_path: Path) -> None:
    """Steps that grow are named on top, a click shows what leaks, and by line the leak is a row of its own."""
    steps = [
        [Op(makes=[f"kept{step}"], module="head", stack="train.py:17:main"), Op("aten.mm.default", "backward")]
        for step in range(5)
    ]
    storages = [Storage(f"kept{step}", 1 << 20, module="head") for step in range(5)]
    tables = make_tables(steps, storages, [Module("", "Net"), Module("head")])
    shown = show(serve(write(tmp_path / "leak.memprof", tables)))
    shown.wait_text("#facts .second", "Memory grows by 1.00 MiB a step (steps 0 to 4)")
    shown.page.get_by_role("button", name="What leaks").click()
    shown.wait_view(tab="leaks")
    shown.wait_text("#panel table", "train.py:17")
    shown.page.keyboard.press("Home")
    shown.page.locator(".segmented label", has_text=re.compile("^line$")).click()
    shown.wait_text("#live-table tbody tr", "train.py:17")
    assert re.search(
        r"5 \N{MULTIPLICATION SIGN} 1\.00 MiB", shown.page.locator("#live-table tbody tr").first.inner_text()
    )


def test_an_invalid_budget_says_so(look: Look, gpt: Served) -> None:
    """The reason stands where the verdict is, and nothing is drawn at zero."""
    shown = look(gpt, "budget=lots")
    shown.wait_text("#facts [role=alert]", "Invalid budget: 'lots' is not a size")


def test_a_row_opens_and_the_way_back(look: Look, gpt: Served) -> None:
    """A tensor in full, the ones like it, its folded stack; Esc goes back to the list."""
    shown = look(gpt)
    shown.page.locator("#live-table td button").first.click()
    shown.wait_text("#live-detail", "4 \N{MULTIPLICATION SIGN} 4.00 MiB like this one")
    assert shown.page.locator("#live-detail .stack details").count() > 0
    shown.page.locator("#live-detail .alike button").nth(1).evaluate("one => one.click()")
    shown.wait_text("#live-detail h3", "layers.1.mlp.0")
    shown.page.locator("#readout").click()
    shown.page.keyboard.press("Escape")
    shown.wait_text("#live-table tbody tr", "layers.0-3.mlp.0")
    assert shown.view.storage == NONE


def test_columns_sort(look: Look, gpt: Served) -> None:
    """By count the rows of most tensors come first; again, last."""
    shown = look(gpt)
    shown.wait_text("#live-table", "layers.0-3")
    counts = "all => all.map((one) => Number(one.dataset.sort))"
    head = shown.page.locator("#live-table th", has_text="count").get_by_role("button")
    head.click()
    shown.wait_idle()  # there are more rows than were fetched
    down = shown.page.eval_on_selector_all("#live-table td:nth-child(3)", counts)
    assert down == sorted(down, reverse=True)
    head.click()
    shown.wait_idle()
    up = shown.page.eval_on_selector_all("#live-table td:nth-child(3)", counts)
    assert up == sorted(up)
    assert up[0] < down[0]


def test_keys_open_pages_and_help(look: Look, gpt: Served) -> None:
    """Digits choose a page, arrows walk the tabs, a question mark lists the keys and Esc closes the list."""
    shown = look(gpt)
    names = list(PAGES)
    shown.page.keyboard.press("2")
    shown.wait_view(tab=names[1])
    shown.page.locator("[role=tab][aria-selected=true]").focus()
    shown.page.keyboard.press("ArrowRight")
    shown.wait_view(tab=names[2])
    shown.page.locator("#readout").click()
    shown.page.keyboard.press("?")
    assert shown.page.locator("#help").evaluate("one => one.open")
    shown.page.keyboard.press("Escape")
    assert not shown.page.locator("#help").evaluate("one => one.open")


@pytest.mark.parametrize("theme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_controls_have_names_and_roles(look: Look, two: Served, theme: str) -> None:
    """The page has a language, tabs are tabs, and each choice, field and button has a name."""
    shown = look(two, "tab=diff&other=1", color_scheme=theme)
    page = shown.page
    assert page.get_attribute("html", "lang") == "en"
    assert page.get_by_role("tab").count() == len(PAGES)
    assert page.get_by_role("tab", selected=True).inner_text() == PAGES["diff"].TITLE
    assert page.get_by_role("radiogroup", name="shown as").count() == 1
    assert page.get_by_role("radio", name="Flame graph").count() == 1
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input:not([type=hidden]):not([aria-hidden])")].filter((one) =>
          !(one.textContent.trim() || one.getAttribute("aria-label") || one.title || one.closest("label")
            || document.querySelector(`label[for="${one.id}"]`))).map((one) => one.outerHTML.slice(0, 150))"""
    )
    assert unnamed == []
