"""What a terminal and a pipe show: wrapped tables, drawings, the progress of long searches."""

from __future__ import annotations

import shutil
from operator import itemgetter
from pathlib import Path

import pytest
from rich.text import Text

from memprof.analysis.table import FIGURE, NAME, TEXT, WORDS, FactTable, shown, sized_parts
from memprof.cli import progress
from memprof.cli.main import main
from memprof.cli.page import Page
from memprof.cli.pages.drawings import draw_front, draw_timeline
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from tests.building import Op, Storage, make_trace
from tests.dashboard.test_reactions import SIZES
from tests.planners.promises import step_named

SAMPLES = Path(__file__).parents[2] / "sample_traces"


SENTENCE = " ".join(f"word{number}" for number in range(60))


PLACE = f"{'folder/' * 8}train.py:1234"


def table_page(width: int) -> list[str]:
    page = Page(is_terminal=False, width=width, has_colour=False)
    units = {"plan": TEXT, "bytes": FIGURE, "module": NAME, "line": NAME, "why": WORDS}
    rows = (
        (SENTENCE, "93,237,072 B", "layers.0.mlp", PLACE, "x" * 300),
        ("short", "1 B", "head", "a.py:1", "none"),
    )
    page.add(FactTable(tuple(shown(name, unit, itemgetter(at)) for at, (name, unit) in enumerate(units.items())), rows))
    return page.render().splitlines()


def test_a_wide_table_wraps_and_loses_nothing() -> None:
    """Words go on in the next line, also those longer than the column; bytes and places stay whole."""
    lines = table_page(160)
    assert max(map(len, lines)) <= 160
    text = " ".join(lines)
    for whole in (*SENTENCE.split(), "93,237,072 B", PLACE, "layers.0.mlp"):
        assert whole in text
    assert text.count("x") == 300
    assert "…" not in text
    assert lines[-1].split() == ["short", "1", "B", "head", "a.py:1", "none"]


def test_a_table_that_cannot_be_narrower_is_whole() -> None:
    """Where numbers and places alone need more than the width, they get it."""
    lines = table_page(60)
    assert PLACE in " ".join(lines)
    assert "93,237,072 B" in lines[1]
    assert 60 < max(map(len, lines)) < 160


def test_a_table_that_fits_is_drawn_as_it_is() -> None:
    """Lines end with their cells, and sentences are never wrapped: one sentence, one line."""
    page = Page(is_terminal=False, width=40, has_colour=False)
    page.add(sized_parts("name", {"a": 1}, 0))
    page.add(Text(SENTENCE))
    assert page.render() == f"name  bytes  share\na       1 B\n{SENTENCE}\n"


@pytest.mark.parametrize(("columns", "widest"), [(None, 160), ("100", 110), ("none", 160), ("0", 160)])
def test_piped_tables_have_a_width(
    columns: str | None,
    widest: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """160 columns, or COLUMNS; reasons were 280 and more. A command to type stays on one line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    shutil.copy(SAMPLES / "gpt" / "run.memprof", "run.memprof")
    assert main(["suggest", "run.memprof", "--budget", "60%", "--allow", "checkpoint,compile,accumulate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("Plans that fit"))
    end = next(number for number, line in enumerate(lines) if line.startswith("lowest peak found"))
    assert max(map(len, lines[start:end])) <= widest
    assert any(line.startswith("next: memprof suggest run.memprof --budget ") for line in lines[end:])


GIB = 1 << 30


def _step(sizes: list[int]) -> Step:
    phases = ["forward", "backward"]
    ops = [Op(phase=phases[at * 2 // len(sizes)], makes=[f"{at}"], frees=[f"{at}"]) for at in range(len(sizes))]
    storages = [Storage(f"{at}", size) for at, size in enumerate(sizes)]
    return make_trace([ops], storages).step(0)


def test_a_timeline_marks_its_peak_and_names_its_phases() -> None:
    """40 operators in 40 columns: each as high as its bytes, the peak's label above its column."""
    sizes = [1 << 10] * 40
    sizes[29] = 8 << 10
    lines = [line.plain for line in draw_timeline(_step(sizes), 80)]
    assert lines[0].rstrip().endswith("peak 8.00 KiB ▼")
    column = lines[0].index("▼")
    assert column == 11 + 29
    assert [line[column] for line in lines[1:9]] == ["█"] * 8
    assert lines[1].startswith(" 8.00 KiB ▕")
    assert lines[5].startswith(" 4.00 KiB ▕")
    assert lines[8][11:] == "█" * 40
    assert lines[7][11:].strip() == "█"
    assert lines[9].split("└")[1].strip("─") == "forward"
    assert lines[9].split("└")[2].strip("─") == "backward"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_timeline_is_no_wider_than_the_terminal(width: int) -> None:
    """Long steps are reduced to their maxima: the full column is there at any width."""
    sizes = [100 + at % 7 for at in range(999)]
    sizes[500] = 10_000
    lines = [line.plain for line in draw_timeline(_step(sizes), width)]
    assert max(map(len, lines)) <= width
    assert sum("█" in line for line in lines[1:9]) == 8


def test_nothing_is_drawn_where_there_is_no_room() -> None:
    """A step of a few operators, a narrow terminal, a step without memory."""
    assert draw_timeline(_step(SIZES), 80) == []
    assert draw_timeline(_step([1] * 100), 30) == []
    assert draw_timeline(_step([0] * 100), 80) == []


def test_the_front_shows_recorded_step_plans_and_budget() -> None:
    """The recorded step at the right end, a slower plan within the budget above and left of its line."""
    lines = [line.plain for line in draw_front([(8 * GIB, 0.0), (4 * GIB, 0.2)], 6 * GIB, 60)]
    top, bottom = lines[0], lines[8]
    assert top.startswith("  +20.0 % ▕●")
    assert bottom.startswith("   +0.0 % ▕")
    assert bottom.rstrip().endswith("○")
    assert all(line[11 + 24] == "┊" for line in lines[:9])
    assert lines[9].split() == ["4.00", "GiB", "8.00", "GiB"]
    assert "budget 6.00 GiB" in lines[10]


def test_one_point_is_no_front() -> None:
    """Where no plan differs from the recorded step, and in a narrow terminal."""
    assert draw_front([(8 * GIB, 0.0)], 6 * GIB, 80) == []
    assert draw_front([(8 * GIB, 0.0), (4 * GIB, 0.2)], 6 * GIB, 30) == []


def test_drawings_are_for_terminals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`report` draws where colours are forced, and writes no block in a pipe."""
    path = "sample_traces/gpt/run.memprof"
    assert main(["report", path]) == 0
    assert "▼ peak" not in capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["report", path]) == 0
    assert "▼ peak 88.92 MiB" in capsys.readouterr().out


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
