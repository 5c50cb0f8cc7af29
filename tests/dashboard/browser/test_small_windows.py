"""What stands on the page of a phone or a small laptop: nothing over something else, and nothing cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memprof.trace.manifest import Manifest
from memprof.trace.store import write_trace
from tests.building import Module, Op, Storage, make_tables
from tests.dashboard.browser.conftest import Served, Shown

PHONE: Any = {"viewport": {"width": 390, "height": 844}}
LAPTOP: Any = {"viewport": {"width": 1024, "height": 768}}
#: Pairs of texts of the table's rows that stand over each other: a name, and the count next to it.
_OVERLAPS = """() => Array.from(document.querySelectorAll("#live-table tbody tr")).filter((row) => {
  const text = document.createRange();
  text.selectNodeContents(row.cells[2]);
  const count = text.getBoundingClientRect();
  return Array.from(row.querySelectorAll("td button")).some((name) => {
    const box = name.getBoundingClientRect();
    return box.right > count.left && box.bottom > count.top && box.top < count.bottom;
  });
}).map((row) => row.innerText)"""


@pytest.mark.parametrize("side", ["flame", "treemap"])
def test_what_fills_the_cursor_ends_above_the_tabs(look: Callable[..., Shown], two: Served, side: str) -> None:
    """On a phone the picture is as high as it is drawn, and its text stands below it."""
    shown = look(two, f"side={side}", **PHONE)
    shown.page.wait_for_selector("#boxes-graph .main-svg", state="attached")
    shown.wait_idle()
    bottoms, tabs = shown.page.evaluate(
        """() => {
          const edge = (name, side) => document.querySelector(name).getBoundingClientRect()[side];
          const names = ["#boxes-graph .main-svg", "#boxes-remark", "#boxes-table"];
          return [names.map((name) => edge(name, "bottom")), edge(".tabs", "top")];
        }"""
    )
    assert bottoms == sorted(bottoms)
    assert bottoms[-1] <= tabs


def test_names_and_counts_do_not_overlap(look: Callable[..., Shown], gpt: Served) -> None:
    """Long names of modules break, on a phone too."""
    for size in (PHONE, LAPTOP):
        shown = look(gpt, **size)
        shown.wait_text("#live-table", "attention.dropout")
        assert shown.page.evaluate(_OVERLAPS) == []


def test_header_of_two_recordings_is_one_line_on_a_laptop(look: Callable[..., Shown], two: Served) -> None:
    """The choice of both, the search, the budget and the buttons."""
    shown = look(two, "other=1", **LAPTOP)
    shown.wait_idle()
    lines = shown.page.evaluate(
        """() => Array.from(document.querySelectorAll("header :is(.brand, button, #find, #budget)"))
          .map((part) => part.getBoundingClientRect())
          .filter((box) => box.width > 1)
          .map((box) => (box.top + box.bottom) / 2)"""
    )
    assert len(lines) >= 6
    assert max(lines) - min(lines) < 8


def test_texts_of_the_allocations_are_whole_on_a_phone(look: Callable[..., Shown], two: Served) -> None:
    """The axis' title and every label are inside the figure."""
    shown = look(two, "tab=allocations&other=1", **PHONE)
    shown.page.wait_for_selector("#allocations-graph .xtitle", state="attached")
    shown.wait_idle()
    outside = shown.page.evaluate(
        """() => {
          const figure = document.querySelector("#allocations-graph .main-svg").getBoundingClientRect();
          return Array.from(document.querySelectorAll("#allocations-graph .main-svg text")).filter((text) => {
            const box = text.getBoundingClientRect();
            return box.width && (box.left < figure.left || box.right > figure.right);
          }).map((text) => text.textContent);
        }"""
    )
    assert outside == []


def test_bars_of_changes_have_whole_texts_on_a_phone(
    show: Callable[..., Shown], serve: Callable[..., Served], tmp_path: Path
) -> None:
    """No size is cut at the edge, and none stands on the name of a bar."""
    names = ["transformer.encoder.attention", "transformer.encoder.output", "transformer.head"]
    modules = [Module("", "Net"), *map(Module, names)]
    for file, sizes in (("base.memprof", (900, 100, 200)), ("other.memprof", (100, 880, 190))):
        storages = [Storage(name, size << 20, module=name) for name, size in zip(names, sizes, strict=True)]
        ops = [Op("aten.mm.default", makes=[name], module=name) for name in names]
        tables = make_tables([[*ops, Op("aten.mm.default", "backward")]], storages, modules)
        write_trace(tmp_path / file, [(Manifest(target="train.py"), tables)])
    shown = show(serve(tmp_path / "base.memprof", tmp_path / "other.memprof"), "tab=diff&other=1", **PHONE)
    shown.page.wait_for_selector("#diff-module-bars .textpoint text", state="attached")
    shown.wait_idle()
    found = shown.page.evaluate(
        """() => {
          const box = (text) => text.getBoundingClientRect();
          const all = (what) => Array.from(document.querySelectorAll(`#diff-module-bars ${what}`));
          const figure = box(all(".main-svg")[0]);
          const names = all(".ytick text").map(box);
          return all(".textpoint text").filter((text) => box(text).right > figure.right
            || names.some((name) => box(text).left < name.right)).map((text) => text.textContent);
        }"""
    )
    assert shown.page.locator("#diff-module-bars .textpoint").count() == 3
    assert found == []


def test_the_cursor_moves_in_both_timelines(look: Callable[..., Shown], two: Served) -> None:
    """Moved in one recording, it is at the same place in the second, below."""
    shown = look(two, "other=1", **LAPTOP)
    shown.page.wait_for_selector("#timeline-other .main-svg .scatterlayer .trace", state="attached")
    shown.wait_idle()
    at = shown.figure()["shapes"][0]["x0"]
    assert shown.figure("timeline-other")["shapes"][0]["x0"] == at
    shown.page.keyboard.press("ArrowRight")
    for name in ("timeline", "timeline-other"):
        shown.page.wait_for_function(
            "([name, x]) => document.querySelector(`#${name} .js-plotly-plot`).layout.shapes[0].x0 === x",
            arg=[name, at + 1],
        )
