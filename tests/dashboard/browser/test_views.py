"""What is drawn, and what a zoom, a click, a key and the address do to it."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.replay.history import History
from memprof.trace.store import Trace
from memprof.units import format_bytes
from memprof_dashboard.figures.shared import draw
from memprof_dashboard.figures.timeline import timeline
from memprof_dashboard.palette import THEMES
from tests.dashboard.browser.conftest import SAMPLES, Served, Shown, assert_true_peak, unit_bytes
from tests.synthetic import write_synthetic

Show = Callable[..., Shown]
#: Operators of the sample GPT's last recorded step, and its peak (sample_traces/gpt/expected.json).
FIRST, END, PEAK_BYTES = 2048, 3072, 93_237_072


def _peak(served: Served, first: int = FIRST, end: int = END) -> int:
    return served.workspace.rank(0, -1).history.peak(first, end)


def test_opens_at_the_peak_of_a_steady_step(show: Show, gpt: Served) -> None:
    """The first picture is the last whole step, the cursor at its peak; areas and total are those of the sample."""
    shown = show(gpt)
    shown.wait_drawn(FIRST, END)
    shown.wait_cursor(_peak(gpt))
    shown.wait_text("#readout", format_bytes(PEAK_BYTES))
    assert shown.page.locator("#facts h1 [title]").first.get_attribute("title") == f"{PEAK_BYTES:,} B"
    shown.wait_text("#facts h1", f"Peaks at {format_bytes(PEAK_BYTES)} in forward of step 4")
    assert_true_peak(shown, FIRST, END)
    figure = shown.figure()
    assert f"peak {format_bytes(PEAK_BYTES)}" in figure["notes"]
    assert max(figure["lines"]["total"]) * unit_bytes(figure["unit"]) == PEAK_BYTES


@pytest.mark.parametrize("sample", ["gpt", "resnet", "lstm"])
def test_drawn_peak_is_the_true_peak_in_any_stretch(sample: str) -> None:
    """In two hundred random ranges of each sample, the highest drawn total is the maximum of the recording."""
    history = History(Trace.open(SAMPLES / sample / "run.memprof"))
    random = np.random.default_rng(11)
    for _ in range(200):
        first, end = sorted(random.choice(history.ops + 1, 2, replace=False).tolist())
        drawn = draw(history.total, first, end, int(random.integers(1, 400)))
        assert history.total[drawn.op_ids].max() == history.total[first:end].max()
        assert drawn.lows.min() == history.total[first:end].min()
        areas = sum(history.alive_bytes(name, drawn.op_ids) for name in history.categories)
        np.testing.assert_array_equal(areas, history.total[drawn.op_ids])
    first, end = 0, history.ops
    total = next(line for line in timeline(history, first, end, THEMES["light"]).data if line["name"] == "total")
    assert float(np.max(total["y"])) * 2**20 == history.total.max()


def test_drag_zooms_everything(look: Show, gpt: Served) -> None:
    """Dragging over a range updates address, strip and table, and the range shows its true peak."""
    shown = look(gpt)
    shown.wait_drawn(FIRST, END)
    shown.drag(0.25, 0.5)
    shown.page.wait_for_function("() => location.search.includes('first=')")
    view = shown.view
    assert view.first == pytest.approx(FIRST + 256, abs=8)
    assert view.end == pytest.approx(FIRST + 512, abs=8)
    shown.wait_drawn(view.first, view.end)
    assert_true_peak(shown, view.first, view.end)
    shown.page.wait_for_function(
        """([first, end]) => {
          const shape = document.querySelector('#overview .js-plotly-plot').layout.shapes[0];
          return shape.x0 === first && shape.x1 === end;
        }""",
        arg=[view.first, view.end],
    )
    shown.page.wait_for_function(
        """([first, end]) => {
          const cells = [...document.querySelectorAll('#timeline-table tbody tr')].map(
            (row) => Number(row.firstChild.textContent));
          return cells.length > 0 && Math.min(...cells) >= first && Math.max(...cells) < end;
        }""",
        arg=[view.first, view.end],
    )


def test_drag_over_the_strip_zooms(look: Show, gpt: Served) -> None:
    """The strip of the whole recording chooses what the timeline shows."""
    shown = look(gpt)
    shown.wait_drawn(FIRST, END)
    shown.drag(0.1, 0.3, "overview")
    shown.page.wait_for_function("() => location.search.includes('first=')")
    view = shown.view
    assert view.first == pytest.approx(307, abs=20)
    assert view.end == pytest.approx(922, abs=20)
    shown.wait_drawn(view.first, view.end)


def test_double_click_shows_everything(look: Show, gpt: Served) -> None:
    """A double click into the timeline shows the whole recording."""
    shown = look(gpt)
    shown.wait_drawn(FIRST, END)
    shown.page.locator("#timeline .nsewdrag.drag").first.dblclick()
    shown.wait_drawn(0, 3072)
    assert_true_peak(shown, 0, 3072)


@pytest.mark.slow
def test_keys_zoom(look: Show, gpt: Served) -> None:
    """Plus halves the range around the cursor, minus doubles it, Home shows all; each with its true peak."""
    shown = look(gpt)
    shown.wait_drawn(FIRST, END)
    shown.wait_cursor(_peak(gpt))
    shown.page.keyboard.press("+")
    at = _peak(gpt)
    first, end = round(at - (at - FIRST) / 2), round(at + (END - at) / 2)
    shown.wait_drawn(first, end)
    assert_true_peak(shown, first, end)
    shown.page.keyboard.press("-")
    shown.page.wait_for_function(
        "() => document.querySelector('#timeline .js-plotly-plot').layout.xaxis.range[1] >= 3070"
    )
    shown.page.keyboard.press("Home")
    shown.wait_drawn(0, 3072)
    assert_true_peak(shown, 0, 3072)


#: Zooms by a key and, in the same turn of the browser, returns the range, the lines drawn, and the milliseconds taken.
_ZOOM = """key => {
  const start = performance.now();
  document.body.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
  const taken = performance.now() - start;
  const {data, layout} = document.querySelector("#timeline .js-plotly-plot");
  const lines = data.filter((line) => line.type === "scatter" && line.xaxis !== "x3");
  const numbers = (values) => Array.from(values._inputArray ?? values);
  return {
    range: layout.xaxis.range,
    x: numbers(lines[0].x),
    lines: Object.fromEntries(lines.map((line) => [line.name, numbers(line.y)])),
    bytes: {MiB: 2 ** 20, GiB: 2 ** 30}[layout.yaxis.title.text],
    notes: layout.annotations.map((note) => note.text),
    taken,
  };
}"""


def _assert_drawn_exactly(history: History, drawn: dict[str, Any]) -> None:
    """Asserts that every column shows the fullest of its operators, with the categories alive then and the least."""
    edges = np.array(drawn["x"], dtype=np.int64)
    assert edges[[0, -1]].tolist() == drawn["range"]
    total = history.total[edges[0] : edges[-1]]
    starts = edges[:-1] - edges[0]
    lines = {name: np.array(values[:-1]) * drawn["bytes"] for name, values in drawn["lines"].items()}
    most = np.maximum.reduceat(total, starts)
    np.testing.assert_array_equal(lines["total"], most)
    np.testing.assert_array_equal(lines.pop("lowest", lines["total"]), np.minimum.reduceat(total, starts))
    np.testing.assert_allclose(sum(lines.values()) - lines["total"], most, rtol=1e-6)
    assert f"peak {format_bytes(int(total.max()))}" in drawn["notes"]


@pytest.mark.parametrize("events", [100_000, 1_000_000])
def test_keys_zoom_without_the_server(
    show: Show, serve: Callable[..., Served], tmp_path_factory: pytest.TempPathFactory, events: int
) -> None:
    """Every zoom is drawn in the browser, each column exactly; the server is asked once, when zooming has paused.

    Where columns hold several operators of the recording, single ones come with its answer.
    """
    path = tmp_path_factory.mktemp("zoom") / "many.memprof"
    write_synthetic(path, events)
    served = serve(path)
    history = served.workspace.rank(0, -1).history
    sent: list[Any] = []
    shown = show(served, "at=12347&first=8001&end=17003", is_drawn=False)  # in no column's beginning
    shown.page.on("response", lambda answer: "/columns?" in answer.url and sent.append(answer))
    shown.page.reload()
    shown.wait_any_drawn()
    shown.wait_idle()
    assert [len(answer.body()) < 2e6 for answer in sent] == [True]
    asked: list[str] = []
    # It looks for new runs every three seconds.
    shown.page.on("request", lambda one: "new-runs" in (one.post_data or "") or asked.append(one.url))
    # Until they are let go, no pause ends.
    shown.page.evaluate("() => { window.setTimeout = Object.assign(() => 0, {before: window.setTimeout}); }")
    keys = [*"-+-", "Home", *"+" * 5, "-", "-", "+"]
    drawn = [shown.page.evaluate(_ZOOM, key) for key in keys]
    for one in drawn:
        _assert_drawn_exactly(history, one)
    assert not asked
    shown.page.evaluate("() => { window.setTimeout = window.setTimeout.before; }")
    deep = [shown.page.evaluate(_ZOOM, "+") for _ in range(12)][-1]
    assert max(deep["lines"]["total"]) * deep["bytes"] >= history.total[slice(*deep["range"])].max()
    shown.page.wait_for_function("() => location.search.includes('first=') && !location.search.includes('first=8001')")
    shown.wait_idle()
    assert_true_peak(shown, *deep["range"])
    assert deep["range"][1] - deep["range"][0] >= 4
    assert asked


def test_the_legend_hides_an_area(look: Show, gpt: Served) -> None:
    """A category has its bytes at the cursor; a click hides its area, here and after a zoom, until the next click."""
    shown = look(gpt)
    shown.wait_drawn(FIRST, END)
    shown.wait_idle()
    button = shown.page.locator("#phases button", has_text="activations")
    held = gpt.workspace.rank(0, -1).history.alive_bytes("activation", np.array([_peak(gpt)]))
    assert button.locator(".held").inner_text() == format_bytes(int(held[0]))
    is_hidden = """() => document.querySelector("#timeline .js-plotly-plot").data.find(
      (line) => line.name === "activations").visible === false"""
    button.click()
    assert shown.page.evaluate(is_hidden)
    shown.page.keyboard.press("+")
    assert shown.page.evaluate(is_hidden)
    shown.page.wait_for_function("() => location.search.includes('first=')")
    shown.wait_idle()
    shown.page.wait_for_function(is_hidden)
    assert button.get_attribute("aria-pressed") == "false"
    button.click()
    assert not shown.page.evaluate(is_hidden)


def test_the_legend_hides_an_area_of_both_recordings(look: Show, two: Served) -> None:
    """Also one that only the lower recording has, and after both are drawn again."""
    shown = look(two, "other=1")
    shown.page.wait_for_selector("#timeline-other .main-svg .scatterlayer .trace", state="attached")
    shown.wait_idle()
    are = """wanted => [["timeline", "activations"], ["timeline-other", "activations"], ["timeline-other", "buffers"]]
      .every(([id, name]) => (document.querySelector(`#${id} .js-plotly-plot`).data.find(
        (line) => line.name === name).visible !== false) === wanted)"""
    for is_visible, theme in ((False, "dark"), (True, "light")):
        for name in ("activations", "buffers"):
            shown.page.locator("#phases button", has_text=name).click()
        shown.page.wait_for_function(are, arg=is_visible)
        shown.page.evaluate("theme => dash_clientside.set_props('theme', {data: theme})", theme)
        shown.wait_idle()
        shown.page.wait_for_function(are, arg=is_visible)


def test_home_shows_everything_from_the_first_operator(look: Show, gpt: Served) -> None:
    """With the cursor on it, and the window beginning there, no zoom around the cursor would reach what is before."""
    shown = look(gpt, f"first={FIRST}&end={END}&at={FIRST}")
    shown.wait_drawn(FIRST, END)
    shown.wait_cursor(FIRST)
    shown.page.keyboard.press("Home")
    shown.wait_drawn(0, 3072)


def test_home_shows_everything_right_after_a_drag_over_the_strip(look: Show, gpt: Served) -> None:
    """A drag zooms the strip itself as well, until the server draws it anew."""
    shown = look(gpt)
    shown.wait_drawn(FIRST, END)
    shown.wait_idle()
    shown.drag(0.1, 0.3, "overview")
    shown.page.wait_for_function(
        "end => document.querySelector('#timeline .js-plotly-plot').layout.xaxis.range[1] < end", arg=FIRST
    )
    shown.page.keyboard.press("Home")
    shown.wait_drawn(0, 3072)
    shown.wait_view(first=0, end=3072)


@pytest.mark.parametrize(
    ("then", "fields"),
    [
        ({"key": {"key": "p"}}, {"first": 1838, "end": 2222, "at": None}),
        ({"go": {"first": 0, "end": 1024, "at": 5}}, {"first": 0, "end": 1024, "at": 5}),
        ({"go": {"trace": 1, "first": -1, "end": -1, "at": -1}}, {"trace": 1, "first": -1, "end": -1}),
        ({"axis": "time"}, {"first": 1838, "end": 2222, "axis": "time"}),
        ({"trace": 1}, {"trace": 1, "first": -1, "end": -1}),
        ({"find": "layer"}, {"first": 1838, "end": 2222, "find": "layer"}),
    ],
)
def test_what_is_done_right_after_a_zoom_comes_after_it(
    look: Show, two: Served, then: dict[str, Any], fields: dict[str, Any]
) -> None:
    """The zoom's range, of which the server has not heard, neither replaces what is done next nor gets lost by it."""
    shown = look(two, "first=0&end=3072&at=2100")
    shown.wait_drawn(0, 3072)
    shown.wait_idle()
    shown.page.evaluate(
        """then => {
          for (let press = 0; press < 3; press += 1) {
            document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "+", bubbles: true}));
          }
          const [[name, value]] = Object.entries(then);
          dash_clientside.set_props(name, typeof value === "object" ? {data: value} : {value});
        }""",
        then,
    )
    wanted = {name: _peak(two, 1838, 2222) if value is None else value for name, value in fields.items()}
    shown.page.wait_for_timeout(400)  # longer than the pause after a zoom, which may ask the server again
    shown.wait_idle()
    assert {name: getattr(shown.view, name) for name in wanted} == wanted


def test_time_zooms_by_key_to_a_millionth(look: Show, gpt: Served) -> None:
    """The range of times stays one that the server draws, however often plus is pressed."""
    shown = look(gpt, "axis=time")
    shown.wait_any_drawn()
    shown.wait_idle()
    ranges = shown.page.evaluate(
        """() => Array.from({length: 40}, () => {
          document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "+", bubbles: true}));
          return document.querySelector("#timeline .js-plotly-plot").layout.xaxis.range;
        })"""
    )
    clock = gpt.workspace.rank(0, -1).clock
    assert clock is not None
    assert ranges[-1] == ranges[-2]
    assert 1e-6 <= (ranges[-1][1] - ranges[-1][0]) / (clock[-1] - clock[0]) < 1e-5
    shown.wait_idle()


def test_the_timeline_comes_first(show: Callable[..., Shown], gpt: Served) -> None:
    """A page that opens asks for its timeline before anything that can wait for it, and for its data once."""
    shown = show(gpt, is_drawn=False)
    asked: list[str] = []
    shown.page.on("request", lambda one: one.method == "POST" and asked.append(json.loads(one.post_data)["output"]))
    shown.page.reload()
    shown.wait_any_drawn()
    shown.wait_idle()
    before = asked[: next(at for at, one in enumerate(asked) if "timeline.figure" in one)]
    later = ("facts", "readout", "live-table", "panel", "tab-whatif", "rank.options", "overview")
    assert not [one for one in before if any(name in one for name in later)]
    assert sum("view.data" in one for one in before) == 1
    assert all(any(name in one for one in asked) for name in later)


def test_buttons_do_what_their_keys_do(look: Show, gpt: Served) -> None:
    """Who does not know the keys has buttons: all, to the peak, in, out."""
    shown = look(gpt, "first=0&end=100&at=3")
    shown.wait_drawn(0, 100)
    shown.page.click("#peak-button")
    shown.wait_cursor(_peak(gpt, 0, 100))
    shown.page.click("#all-button")
    shown.wait_drawn(0, 3072)
    shown.page.click("#in-button")
    shown.page.wait_for_function(
        "() => document.querySelector('#timeline .js-plotly-plot').layout.xaxis.range[1] < 3072"
    )
    shown.page.click("#out-button")
    shown.page.wait_for_function("() => document.querySelector('#timeline .js-plotly-plot').layout.xaxis.range[0] < 20")


def test_arrows_move_by_operator_and_by_step(look: Show, gpt: Served) -> None:
    """An arrow key moves to the next operator; with Shift, to the same place one step on, and the range follows."""
    shown = look(gpt, "at=2100&first=2048&end=3072")
    shown.wait_cursor(2100)
    shown.page.keyboard.press("ArrowRight")
    shown.wait_cursor(2101)
    shown.page.keyboard.press("ArrowLeft")
    shown.wait_cursor(2100)
    shown.page.keyboard.press("Shift+ArrowLeft")
    shown.wait_cursor(1076)
    shown.wait_drawn(564, 1588)
    shown.page.keyboard.press("Shift+ArrowRight")
    shown.wait_cursor(2100)


def test_arrows_stop_at_the_ends(look: Show, gpt: Served) -> None:
    """There is nothing before the first operator."""
    shown = look(gpt, "at=0&first=0&end=50")
    shown.wait_cursor(0)
    shown.page.keyboard.press("ArrowLeft")
    shown.page.keyboard.press("ArrowRight")
    shown.wait_cursor(1)


def test_p_goes_to_the_peak_of_what_is_shown(look: Show, gpt: Served) -> None:
    """P moves the cursor to the peak of the range."""
    shown = look(gpt, "at=10&first=0&end=300")
    shown.wait_cursor(10)
    shown.page.keyboard.press("p")
    shown.wait_cursor(_peak(gpt, 0, 300))


def test_keys_work_after_a_tab_or_a_choice_was_clicked(look: Show, gpt: Served) -> None:
    """The focus is on what was clicked, which keeps the arrows; all other keys go on working."""
    shown = look(gpt, f"at={FIRST}")
    shown.open_tab("blocks", "Lifetimes")
    shown.page.keyboard.press("p")
    shown.wait_cursor(_peak(gpt))
    shown.page.locator("#side label", has_text="Treemap").click()
    shown.wait_view(side="treemap")
    shown.page.keyboard.press("f")
    shown.wait_view(side="flame")
    shown.page.keyboard.press("t")


def test_pages_without_content_are_gray_and_say_why(look: Show, gpt: Served) -> None:
    """One recording of a job of one process on the CPU."""
    page = look(gpt).page
    page.wait_for_selector("#tab-segments.is-empty")
    grey = page.locator(".tabs .is-empty")
    assert grey.all_text_contents() == ["Segments", "Diff", "Allocations", "Ranks", "Host memory"]
    assert [one.get_attribute("title") for one in grey.all()] == [
        "no caching allocator on CPU",
        "needs two recordings",
        "needs two recordings",
        "recorded one process",
        "too few samples of host memory",
    ]


def test_time_is_an_axis(look: Show, gpt: Served) -> None:
    """Over milliseconds: a drag zooms to the operators that run then, and a click puts the cursor where it is."""
    shown = look(gpt)
    clock = gpt.workspace.rank(0, -1).clock
    assert clock is not None
    shown.page.locator("#axis label", has_text="time").click()
    shown.wait_view(axis="time")
    shown.wait_idle()
    figure = shown.figure()
    assert figure["range"] == [clock[FIRST], clock[END]]
    assert max(figure["lines"]["total"]) * unit_bytes(figure["unit"]) == PEAK_BYTES
    shown.drag(0.25, 0.5)
    shown.page.wait_for_function("() => !location.search.includes('first=2048')")
    shown.wait_idle()
    low, high = np.searchsorted(clock, clock[FIRST] + np.array([0.25, 0.5]) * (clock[END] - clock[FIRST])).tolist()
    assert [shown.view.first, shown.view.end] == pytest.approx([low - 1, high], abs=3)
    shown.page.locator("#axis label", has_text="operators").click()
    shown.wait_idle()


def test_slash_goes_to_the_search_and_keys_inside_do_nothing(look: Show, gpt: Served) -> None:
    """Slash focuses the search; what is typed into it is text, not a command."""
    shown = look(gpt, "at=2100")
    shown.wait_cursor(2100)
    shown.page.keyboard.press("/")
    shown.page.wait_for_function("() => document.activeElement.id === 'find'")
    for key in ("p", "Home", "ArrowLeft", "+", "-"):
        shown.page.keyboard.press(key)
    shown.wait_view(find="p+-" if shown.page.input_value("#find") == "p+-" else shown.page.input_value("#find"))
    assert sorted(shown.page.input_value("#find")) == ["+", "-", "p"]
    assert (shown.view.at, shown.view.first) == (2100, FIRST)


def test_escape_lets_go_of_storage_and_search(look: Show, gpt: Served) -> None:
    """Escape clears what is searched for and the storage that was chosen."""
    shown = look(gpt, "find=layers&storage=3")
    shown.page.wait_for_function("() => document.querySelector('#find').value === 'layers'")
    shown.page.locator("#readout").click()
    shown.page.keyboard.press("Escape")
    shown.page.wait_for_function("() => document.querySelector('#find').value === ''")
    assert (shown.view.find, shown.view.storage) == ("", -1)


def test_click_shows_what_is_alive_there(look: Show, gpt: Served) -> None:
    """A click moves the cursor; sizes in the table and the rest below it sum to what is alive at that operator."""
    shown = look(gpt, "first=2048&end=2148")
    shown.wait_drawn(2048, 2148)
    box = shown.page.locator("#timeline .nsewdrag.drag").first.bounding_box()
    shown.page.mouse.click(box["x"] + 0.305 * box["width"], box["y"] + box["height"] / 2)
    shown.wait_cursor(2078)
    history = gpt.workspace.rank(0, -1).history
    total = int(history.total[2078]) - history.workspace(2078)
    shown.wait_text("#live-table .note", format_bytes(total))
    listed = shown.page.eval_on_selector_all(
        "#live-table td:first-child", "all => all.map((one) => Number(one.dataset.sort))"
    )
    rows = history.alive(2078)
    assert int(history.size[rows].sum()) == total
    assert listed == sorted(listed, reverse=True)
    rest = re.search(r"not listed: ([0-9.]+ \w+)", shown.page.inner_text("#live-table .note"))
    assert format_bytes(total - sum(listed)) == (rest[1] if rest else "0 B")


def test_click_on_a_storage_tells_its_story(look: Show, gpt: Served) -> None:
    """Choosing the largest shows who made it, why it is alive, and the line of the script."""
    shown = look(gpt)
    shown.page.locator("#live-table td button").first.click()
    shown.wait_text("#live-detail", "why alive")
    shown.wait_text("#live-detail", "Python stack, innermost first")
    assert "train.py" in shown.page.locator("#live-detail .stack .own").first.inner_text()
    assert shown.view.storage >= 0
    shown.page.get_by_role("button", name="zoom to its lifetime").click()
    history = gpt.workspace.rank(0, -1).history
    created = int(history.created[shown.view.storage])
    shown.page.wait_for_function("() => location.search.includes('first=') && !location.search.includes('first=2048')")
    assert shown.view.first <= created < shown.view.end


def test_address_restores_the_view(look: Show, gpt: Served) -> None:
    """Reloading the address restores range, cursor, search and budget."""
    shown = look(gpt, "first=100&end=400&at=250&find=layers.1&budget=50%25&storage=7")
    shown.wait_drawn(100, 400)
    shown.page.reload()
    shown.wait_drawn(100, 400)
    shown.wait_cursor(250)
    assert shown.page.input_value("#find") == "layers.1"
    assert shown.page.input_value("#budget") == "50%"
    shown.wait_text("#live-detail", "storage 7")


def test_back_goes_back(look: Show, gpt: Served) -> None:
    """The browser's back button shows what was seen before."""
    shown = look(gpt, "first=0&end=400&at=50")
    shown.wait_drawn(0, 400)
    shown.page.keyboard.press("Home")
    shown.wait_drawn(0, 3072)
    shown.wait_view(end=3072)
    shown.page.go_back()
    shown.wait_drawn(0, 400)
    shown.page.go_forward()
    shown.wait_drawn(0, 3072)


def test_search_highlights_and_filters(look: Show, gpt: Served) -> None:
    """Searching draws the bytes of what is found, exactly, and lists nothing else."""
    shown = look(gpt)
    shown.wait_drawn(FIRST, END)
    shown.page.fill("#find", "layers.0")
    shown.page.wait_for_function(
        "() => document.querySelector('#timeline .js-plotly-plot').data.some((line) => line.name === 'found')"
    )
    figure = shown.figure()
    assert 0 < max(figure["lines"]["found"]) < max(figure["lines"]["total"])
    assert all(
        found <= total * (1 + 1e-9)
        for found, total in zip(figure["lines"]["found"], figure["lines"]["total"], strict=True)
    )
    shown.wait_text("#live-table", "layers.0")
    shown.page.fill("#find", "no such thing")
    shown.wait_text("#live-table", "No live storage matches 'no such thing'")


@pytest.mark.parametrize(
    ("budget", "size"), [("40MiB", 40 * 2**20), pytest.param("50%", PEAK_BYTES // 2, marks=pytest.mark.slow)]
)
def test_budget_line(look: Show, gpt: Served, budget: str, size: int) -> None:
    """A budget, as a size or a share of the peak, is a line at its height and a figure in the summary."""
    shown = look(gpt)
    shown.wait_drawn(FIRST, END)
    shown.page.fill("#budget", budget)
    shown.page.keyboard.press("Enter")
    shown.wait_text("#facts h1", f"Over the budget by {format_bytes(PEAK_BYTES - size)}")
    shown.page.wait_for_function(
        """y => document.querySelector('#timeline .js-plotly-plot').layout.shapes.some(
          (one) => Math.abs(one.y0 - y) < 1e-6)""",
        arg=size / 2**20,
    )


@pytest.mark.slow
def test_theme_follows_the_system_and_the_button(show: Show, look: Show, gpt: Served) -> None:
    """Dark where the system is dark, light again by the button, and that is kept."""
    shown = show(gpt, color_scheme="dark")
    shown.page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    dark = "#e8ecf1"
    shown.page.wait_for_function(
        "ink => document.querySelector('#timeline .js-plotly-plot').layout.font.color === ink", arg=dark
    )
    shown.page.click("#theme-button")
    shown.page.wait_for_function(
        "ink => document.querySelector('#timeline .js-plotly-plot').layout.font.color !== ink", arg=dark
    )
    shown.page.reload()
    shown.page.wait_for_selector("#timeline .main-svg .scatterlayer .trace", state="attached")
    assert shown.page.evaluate("document.documentElement.dataset.theme") == "light"
    # Who never chose follows the system when it changes.
    other = look(gpt)
    assert other.page.evaluate("document.documentElement.dataset.theme") == "light"
    for theme in ("dark", "light"):
        other.page.emulate_media(color_scheme=theme)
        other.page.wait_for_function("name => document.documentElement.dataset.theme === name", arg=theme)


def test_choosing_the_other_recording(look: Show, two: Served) -> None:
    """The recording is chosen by name; it opens at its own steady step."""
    shown = look(two)
    shown.wait_drawn(FIRST, END)
    shown.page.click("#trace")
    shown.page.get_by_role("option", name="resnet").click()
    shown.wait_view(trace=1)
    rank = two.workspace.rank(1, -1)
    shown.wait_drawn(*rank.step_range(rank.fullest_number()))
    shown.wait_text("#facts", format_bytes(int(rank.history.total.max())))


def test_two_side_by_side_share_their_scale(look: Show, two: Served) -> None:
    """Beside the GPT, the ResNet's timeline stands on the same scale, so that heights compare."""
    shown = look(two, "other=1")
    shown.wait_drawn(FIRST, END)
    shown.page.wait_for_selector("#timeline-other .main-svg .scatterlayer .trace", state="attached")
    mine, beside = shown.figure(), shown.figure("timeline-other")
    assert (mine["top"], mine["unit"]) == (beside["top"], beside["unit"])
    truth = int(two.workspace.rank(1, -1).history.total.max())
    assert max(beside["lines"]["total"]) * unit_bytes(beside["unit"]) <= truth * (1 + 1e-12)


def test_a_zoom_of_the_second_recording_zooms_both(look: Show, two: Served) -> None:
    """Both timelines have one axis of time, whichever of them is dragged over."""
    shown = look(two, "other=1")
    shown.wait_drawn(FIRST, END)
    shown.page.wait_for_selector("#timeline-other .main-svg .scatterlayer .trace", state="attached")
    box = shown.page.locator("#timeline-other .nsewdrag").first.bounding_box()
    assert box is not None
    shown.page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=4)
    shown.page.mouse.up()
    shown.page.wait_for_function(
        """([first, end]) => ["timeline", "timeline-other"].every(name => {
          const [low, high] = document.querySelector(`#${name} .js-plotly-plot`).layout.xaxis.range;
          return Math.abs(low - first) <= 2 && Math.abs(high - end) <= 2;
        })""",
        arg=[FIRST + (END - FIRST) / 4, FIRST + (END - FIRST) / 2],
    )


def test_the_timelines_are_saved_as_pictures(look: Show, two: Served, tmp_path: Path) -> None:
    """A PNG of the timeline that is shown, with twice as many pixels as on the screen."""
    shown = look(two)
    shown.wait_drawn(FIRST, END)
    box = shown.page.locator("#timeline .js-plotly-plot").bounding_box()
    assert box is not None
    with shown.page.expect_download() as waiting:
        shown.page.click("#png-button")
    assert waiting.value.suggested_filename == "memprof-timeline.png"
    waiting.value.save_as(tmp_path / "timeline.png")
    head = (tmp_path / "timeline.png").read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    size = (int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big"))
    assert size == pytest.approx((2 * box["width"], 2 * box["height"]), abs=2)


def test_the_hover_says_the_phase(look: Show, gpt: Served) -> None:
    """Wherever the pointer is over the timeline, the label names the operator, its line, and the phase it is in."""
    shown = look(gpt)
    shown.wait_drawn(FIRST, END)
    history = gpt.workspace.rank(0, -1).history
    box = shown.page.locator("#timeline .nsewdrag").first.bounding_box()
    assert box is not None
    for share in (0.1, 0.4, 0.9):
        shown.page.mouse.move(box["x"] + share * box["width"], box["y"] + box["height"] / 3)
        phase = history.phases[history.phase[FIRST + int(share * (END - FIRST))]]
        shown.page.wait_for_function(
            "phase => document.querySelector('#timeline .hoverlayer').textContent.includes(`phase : ${phase}`)",
            arg=phase,
        )


def test_download_is_what_is_shown(look: Show, gpt: Served, tmp_path: Path) -> None:
    """The CSV has a row for each operator shown, whose categories sum to the total of the recording."""
    shown = look(gpt, "first=2048&end=2148")
    shown.wait_drawn(2048, 2148)
    with shown.page.expect_download() as waiting:
        shown.page.click("#download-button")
    waiting.value.save_as(tmp_path / "down.csv")
    with (tmp_path / "down.csv").open(newline="") as file:
        heads, *rows = csv.reader(file)
    assert heads[:5] == ["operator", "step", "phase", "name", "total bytes"]
    assert [int(row[0]) for row in rows] == list(range(2048, 2148))
    history = gpt.workspace.rank(0, -1).history
    for row in rows:
        assert int(row[4]) == sum(map(int, row[5:])) == history.total[int(row[0])]


def test_view_as_table(look: Show, gpt: Served) -> None:
    """What is drawn can be read as a table, which holds the peak."""
    shown = look(gpt)
    shown.wait_drawn(FIRST, END)
    shown.page.click("#timeline-table summary")
    shown.wait_text("#timeline-table table", "total bytes")
    peak = _peak(gpt)
    row = shown.page.locator("#timeline-table tbody tr").filter(has=shown.page.locator(f"td:text-is('{peak}')"))
    assert str(PEAK_BYTES) in re.sub(r"\D+", " ", row.first.inner_text()).split()


def test_what_waits_for_the_timeline_follows_its_range(look: Show, gpt: Served) -> None:
    """The table and the marks in the overview are drawn after the timeline, and for the same range."""
    shown = look(gpt, "first=0&end=100&at=3")
    shown.wait_drawn(0, 100)
    reads = (
        "() => document.querySelector('#timeline-table tbody')?.textContent ?? ''",
        "() => JSON.stringify(document.querySelector('#overview .js-plotly-plot')?.layout?.shapes ?? [])",
    )
    for read in reads:
        shown.page.wait_for_function(f"() => ({read})().length > 2")
    before = [shown.page.evaluate(read) for read in reads]
    for key, end in (("Home", 3072), ("+", None)):
        shown.page.keyboard.press(key)
        if end is not None:
            shown.wait_drawn(0, end)
        for number, read in enumerate(reads):
            shown.page.wait_for_function(f"(before) => ({read})() !== before", arg=before[number])
        before = [shown.page.evaluate(read) for read in reads]


def test_no_page_is_heavy(look: Show, gpt: Served) -> None:
    """An answer is below 150 kB and a request below 20 kB, whatever one does."""
    shown = look(gpt)
    sizes: list[tuple[str, int, int]] = []

    def weigh(answer: Any) -> None:
        if answer.request.method == "POST":
            asked = len(answer.request.post_data or "")
            sizes.append((answer.url, asked, int(answer.headers.get("content-length", 0))))

    shown.page.on("response", weigh)
    shown.page.keyboard.press("Home")
    shown.wait_drawn(0, 3072)
    shown.page.keyboard.press("ArrowRight")
    shown.wait_idle()
    shown.page.remove_listener("response", weigh)
    assert sizes
    assert max(request for _, request, _ in sizes) < 20_000
    assert max(answer for _, _, answer in sizes) < 150_000
