"""Ranks side by side, on four processes small enough to work out by hand."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly")

from plotly.utils import PlotlyJSONEncoder

from memprof.analysis.ranks.rank_report import RankCurves
from memprof.errors import BadInputError
from memprof.replay.history import History
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, Ops
from memprof.trace.store import Trace
from memprof_dashboard.figures.ranks import curves, ranks
from memprof_dashboard.pages import ranks as ranks_page
from memprof_dashboard.pages.ranks import RanksPage, verdict
from memprof_dashboard.palette import THEMES
from memprof_dashboard.sources import Source, Workspace
from memprof_dashboard.state import View
from memprof_dashboard.views import columns as columns_module
from memprof_dashboard.views.columns import MOST_COLUMNS, RankPeaks, compare_ranks, read_peaks
from tests.building import Op, Storage, Tables, make_tables

KIB = 1024
LIGHT = THEMES["light"]


def _job(activation: int, idle: int = 0, steps: int = 2) -> Tables:
    """Steps of four operators: 10 KiB of weight, then an activation, then also a gradient of 2 KiB, then neither.

    ``idle`` operators more follow in each step.
    """
    return make_tables(
        [
            [
                Op(makes=["a"], reads=["w"]),
                Op(reads=["a"]),
                Op(phase="backward", makes=["g"], reads=["a"], frees=["a"]),
                Op(phase="optimizer", reads=["g"], mutates=["w"], frees=["g"]),
                *([Op(phase="other")] * idle),
            ]
        ]
        * steps,
        [
            Storage("w", 10 * KIB, "parameter"),
            Storage("a", activation * KIB),
            Storage("g", 2 * KIB, "gradient"),
        ],
    )


def _trace(*jobs: Tables) -> Trace:
    manifests = [Manifest(target="train.py", rank=number, world_size=len(jobs)) for number in range(len(jobs))]
    return Trace.of(list(zip(manifests, jobs, strict=True)), Path("made-by-hand.memprof"))


@pytest.fixture
def trace() -> Trace:
    """Four ranks with activations of 4, 6, 20 and 3 KiB; the last runs two operators more in each step."""
    return _trace(_job(4), _job(6), _job(20), _job(3, idle=2))


def _peaks(trace: Trace) -> tuple[RankPeaks, ...]:
    return tuple(read_peaks(trace.rank_trace(number)) for number in trace.ranks)


def _text(component: object) -> str:
    return json.dumps(component, cls=PlotlyJSONEncoder, ensure_ascii=False)


def _workspace(trace: Trace) -> Workspace:
    return Workspace([Source(trace.path, "made by hand", trace)])


def test_columns_hold_each_ranks_peak(trace: Trace) -> None:
    """Every column holds what each rank has at its peak there."""
    peaks = _peaks(trace)
    compared = compare_ranks(peaks[:3], peaks[0], 0, 4)
    assert (compared.peaks / KIB).tolist() == [[14, 14, 16, 12], [16, 16, 18, 12], [30, 30, 32, 12]]
    assert (compared.spread / KIB).tolist() == [16, 16, 16, 0]


def test_ranks_of_other_operators_are_aligned_by_step(trace: Trace) -> None:
    """A rank that runs more operators is cut as far inside the same steps."""
    peaks = _peaks(trace)
    compared = compare_ranks(peaks, peaks[0], 4, 8)
    assert peaks[3].ops == 12
    ops = peaks[3].op_ids[compared.stretch[3]]
    assert (peaks[3].step[compared.stretch[3]] == 1).all()
    assert ops[0] == 6
    assert np.nanmax(compared.peaks[3]) == 15 * KIB


def test_verdict_names_the_worst_and_the_spread(trace: Trace) -> None:
    """The sentence names the worst rank, by how much, where, and between which ranks most lies."""
    peaks = _peaks(trace)
    text = verdict(compare_ranks(peaks, peaks[0], 0, 8))
    assert "Rank 2 peaks highest: 32.00 KiB in backward of step 0, 15.00 KiB above the median of 4 ranks" in text
    assert "rank 3 peaks lowest, at 15.00 KiB" in text
    assert "between rank 2 and rank 3" in text


def test_equal_ranks_are_called_equal() -> None:
    """Ranks that do the same are not distinguished."""
    peaks = _peaks(_trace(_job(4), _job(4)))
    text = verdict(compare_ranks(peaks, peaks[0], 0, 8))
    assert text == "All 2 ranks peak at 16.00 KiB, in backward of step 0. The ranks hold the same at every point."


def test_missing_steps_stay_blank() -> None:
    """A rank that recorded fewer steps has no peak in the others."""
    peaks = _peaks(_trace(_job(4), _job(20, steps=1)))
    compared = compare_ranks(peaks, peaks[0], 0, 8)
    assert np.isfinite(compared.peaks[1]).tolist() == [True] * 4 + [False] * 4
    assert np.isnan(compared.spread[4:]).all()
    only = compare_ranks(peaks, peaks[0], 4, 8)
    assert only.peak_stretch(1) == NONE
    assert "Rank 0 peaks at 16.00 KiB" in verdict(only)


def test_long_recordings_keep_their_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of more operators than are kept is still shown with its true peak, in a bounded number of columns."""
    monkeypatch.setattr(columns_module, "MOST_STRETCHES", 50)
    trace = _trace(_job(4, steps=300), _job(6, steps=300))
    peaks = _peaks(trace)
    assert [len(rank.peaks) for rank in peaks] == [50, 50]
    compared = compare_ranks(peaks, peaks[0], 0, 1200)
    assert compared.peaks.shape == (2, MOST_COLUMNS)
    assert [int(np.nanmax(row)) for row in compared.peaks] == [
        int(History(trace.rank_trace(number)).total.max()) for number in (0, 1)
    ]


def test_figure_is_small_and_marks_the_worst(trace: Trace) -> None:
    """The heatmap has a row for each rank and names the worst; 64 ranks stay a small answer."""
    peaks = _peaks(trace)
    figure = ranks(compare_ranks(peaks, peaks[0], 0, 8), LIGHT)
    assert list(figure.data[0].y) == ["rank 0", "rank 1", "rank 2", "rank 3"]
    assert figure.layout.annotations[0].text == "rank 2's peak"
    many = _peaks(_trace(_job(4, steps=200))) * 64
    assert len(_text(ranks(compare_ranks(many, many[0], 0, 800), LIGHT))) < 150_000


def test_ranks_are_read_one_at_a_time(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer stops reading when its time is up, the next goes on, and no rank is read twice or held whole."""
    alive: list[int] = []
    read = ranks_page.read_peaks

    def counted(one: Trace) -> RankPeaks:
        gc.collect()
        alive.append(sum(isinstance(thing, History) for thing in gc.get_objects()))
        return read(one)

    monkeypatch.setattr(ranks_page, "read_peaks", counted)
    gc.collect()
    before = sum(isinstance(thing, History) for thing in gc.get_objects())
    page = RanksPage()
    assert [len(page.read(trace, patience=-1).peaks) for _ in range(5)] == [1, 2, 3, 4, 4]
    assert alive == [before] * 4


def test_damaged_rank_is_told_and_the_others_are_shown(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that cannot be read is named, and the others are compared."""
    read = ranks_page.read_peaks

    def damaged(one: Trace) -> RankPeaks:
        if one.rank == 1:
            raise BadInputError("its table 'ops' cannot be read")
        return read(one)

    monkeypatch.setattr(ranks_page, "read_peaks", damaged)
    page, view = RanksPage(), View(tab="ranks", first=0, end=8, at=0)
    figure, remark, _, is_done = page._filled(_workspace(trace), view, "light")
    assert is_done
    assert "Cannot read rank 1: its table 'ops' cannot be read" in _text(remark)
    assert list(figure.data[0].y) == ["rank 0", "rank 2", "rank 3"]


def test_unread_ranks_are_announced(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """While ranks are left to read, the page says how many, and asks again."""
    monkeypatch.setattr(RanksPage.read, "__defaults__", (-1.0,))
    _, remark, _, is_done = RanksPage()._filled(_workspace(trace), View(tab="ranks", first=0, end=8), "light")
    assert not is_done
    assert "3 of 4 left" in _text(remark)


def test_table_orders_ranks_by_peak(trace: Trace) -> None:
    """The table has each rank's peak, its phase and its largest category, the worst first."""
    _, _, table, _ = RanksPage()._filled(_workspace(trace), View(tab="ranks", first=0, end=8), "light")
    text = _text(table)
    places = [text.index(f'"rank {number}"') for number in (2, 1, 0, 3)]
    assert places == sorted(places)
    assert "+15.00 KiB" in text
    assert "activations" in text
    assert "backward of step 0" in text


def test_click_goes_to_the_rank(trace: Trace) -> None:
    """A click on a rank opens it, with the cursor at the peak operator of the clicked column."""
    page, workspace, view = RanksPage(), _workspace(trace), View(tab="ranks", first=0, end=8)
    page.read(trace)
    assert page._jump(workspace, view, 2, 6.5) == {"rank": 2, "at": 6, "storage": -1}
    assert page._jump(workspace, view, 2, None) == {"rank": 2, "at": 2, "storage": -1}


def test_one_rank_has_nothing_to_compare() -> None:
    """A recording of one process says why there is nothing to see."""
    text = _text(RanksPage().layout(_workspace(_trace(_job(4))), View(tab="ranks")))
    assert "Only one rank" in text
    assert "single process" in text


def test_rank_without_operators_is_blank() -> None:
    """A rank that recorded no operators has a blank row."""
    empty: Any = {**_job(4), Ops: Ops.empty()}
    empty = {kind: kind.empty() for kind in empty}
    peaks = _peaks(_trace(_job(4), empty))
    compared = compare_ranks(peaks, peaks[0], 0, 8)
    assert np.isnan(compared.peaks[1]).all()
    assert len(ranks(compared, LIGHT).data[0].y) == 2


def test_summaries_are_shown_below(trace: Trace) -> None:
    """How far ranks lie apart, by phase and category, stands below the picture for any number of ranks."""
    text = _text(RanksPage().layout(_workspace(trace), View(tab="ranks", first=0, end=8)))
    assert "Spread by phase" in text
    assert "Spread by category" in text
    assert "activation" in text


def test_very_many_ranks_are_shown_by_their_summaries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more ranks than are read one by one, the heatmap and the table show the recording's summary."""
    many = _trace(*(_job(4 + number % 7) for number in range(70)))
    monkeypatch.setattr(ranks_page, "read_peaks", lambda one: pytest.fail("a rank's own tables were read"))
    figure, remark, table, is_done = RanksPage()._filled(_workspace(many), View(tab="ranks", first=0, end=8), "light")
    assert is_done
    assert figure.data[0].z.shape == (70, 4)
    assert float(figure.data[0].z.max()) == 22.0
    assert "the step with the highest peak of each of 70 ranks" in _text(remark)
    # Ranks 6, 13, 20 ... have the largest activation, of 10 KiB.
    assert _text(table).index('"rank 6"') < _text(table).index('"rank 13"') < _text(table).index('"rank 5"')


def test_a_rank_of_very_many_can_be_gone_to() -> None:
    """A click on a row of the picture, or of the table, goes to that rank."""
    many = _trace(*(_job(4) for _ in range(70)))
    assert RanksPage()._jump(_workspace(many), View(tab="ranks", first=0, end=8), 66, None) == {
        "rank": 66,
        "storage": -1,
    }


def test_the_picture_of_a_thousand_ranks_stays_small() -> None:
    """1,024 ranks of 256 columns result in a response of at most a megabyte."""
    found = RankCurves(np.arange(1024), np.random.default_rng(0).integers(0, 2**33, (1024, 256)))
    figure = curves(found, LIGHT)
    assert figure.data[0].z.max() == np.float32(found.bytes.max() / 2**30)
    assert len(_text(figure)) < 1_000_000
