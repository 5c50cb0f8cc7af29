"""The drawings of a terminal, on steps small enough to work out by hand; none in a pipe."""

from __future__ import annotations

import pytest

from memprof.cli.main import main
from memprof.cli.pages.drawings import draw_front, draw_timeline
from memprof.trace.step import Step
from tests.building import Op, Storage, make_trace
from tests.dashboard.test_reactions import SIZES

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
