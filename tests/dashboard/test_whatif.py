"""The what-if page: the Pareto front, planner lines, background searches, and verified runs."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("plotly")

from hypothesis import given
from hypothesis import strategies as st
from plotly.utils import PlotlyJSONEncoder

from memprof.analysis.plans.plan_rows import plan_tables, rows_of_search, shortest_refused
from memprof.analysis.plans.predict import Forecast, commands_under, forecast, predicted_trace
from memprof.analysis.plans.suggest import Suggestion
from memprof.cli.main import main
from memprof.cli.page import Page
from memprof.errors import BadInputError, MemprofError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import format_plan, parse_plan
from memprof.policies.registry import default_policies
from memprof.replay.live import live_bytes
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.store import Trace
from memprof_dashboard.figures.whatif import (
    MOST_DOMINATED,
    Measured,
    PlannerLine,
    Plans,
    is_on_front,
    pareto,
    planner_lines,
)
from memprof_dashboard.pages.whatif import WhatIf
from memprof_dashboard.palette import THEMES
from memprof_dashboard.sources import Rank, Source, Workspace
from memprof_dashboard.state import View
from memprof_dashboard.whatif import plan_parts
from memprof_dashboard.whatif.dry_frames import DryFrames
from memprof_dashboard.whatif.planning import (
    SearchForm,
    detail_of,
    find_changes,
    find_plans,
    plans_of,
    run_planners,
    runs_under_plans,
)
from memprof_dashboard.whatif.workspace import Search, Searches
from tests.analysis.test_snapshot_plans import imported, training
from tests.browsing import text_of

NONE = DryFrames(may_run=False)
MIB = 1024**2
LIGHT = THEMES["light"]
GPT = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"
LSTM = GPT.parents[1] / "lstm" / "run.memprof"


@pytest.fixture(scope="module")
def rank() -> Rank:
    """The recorded GPT."""
    return Rank(Trace.open(GPT))


@pytest.fixture(scope="module")
def found(rank: Rank) -> Suggestion:
    """What fits 60 % of its peak with checkpointing alone."""
    return find_plans(rank, SearchForm("60%", ("checkpoint",)), NONE, lambda _: None)


def test_the_simplest_plan_is_a_button(rank: Rank) -> None:
    """The sentence that compares it with the fastest chooses it, by an id of its own beside that of its row."""
    found = find_plans(rank, SearchForm("60%", ("swap",)), NONE, lambda _: None)
    assert found.simplest
    sentence = next(one for one in plan_parts.summary(found) if "simplest that fits" in text_of(one))
    chosen = sentence.children[1].id["plan"]
    assert isinstance(chosen, str)
    assert plans_of(found)[int(chosen)] is found.plans[found.simplest - 1]


def _text(component: object) -> str:
    return json.dumps(component, cls=PlotlyJSONEncoder, ensure_ascii=False)


def _plans(*points: tuple[int, float]) -> Plans:
    peaks, times = zip(*points, strict=True)
    return Plans(np.array(peaks, dtype=np.int64), np.array(times), [f"plan {at}" for at in range(len(points))])


def test_the_front_is_what_nothing_beats() -> None:
    """Worked out by hand: of four plans, one is slower and larger than another, and one only equals another."""
    plans = _plans((10, 1.5), (20, 1.2), (25, 1.3), (20, 1.2))
    assert is_on_front(plans.peak_bytes, plans.relative_time).tolist() == [True, True, False, False]


@given(points=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20))
def test_every_plan_is_on_the_front_or_beaten(points: list[tuple[int, int]]) -> None:
    """Checked pair by pair: a plan is off the front exactly where another is as good in both and better in one."""
    peaks, times = np.array([p for p, _ in points], dtype=np.int64), np.array([float(t) for _, t in points])
    on_front = is_on_front(peaks, times)
    for at, (peak, duration) in enumerate(points):
        beaten = any(
            (p <= peak and t <= duration) and ((p, t) != (peak, duration) or other < at)
            for other, (p, t) in enumerate(points)
            if other != at
        )
        assert on_front[at] == (not beaten)


def test_points_tell_which_plan_they_are() -> None:
    """A click on a point returns the plan's index, on the front and off it; the recorded step is not a plan."""
    figure = pareto(_plans((10 * MIB, 1.5), (25 * MIB, 1.3), (20 * MIB, 1.2)), 40 * MIB, 22 * MIB, LIGHT)
    rest, front, recorded = figure.data
    assert list(rest.customdata) == [1]
    assert list(front.customdata) == [0, 2]
    assert np.asarray(front.x).tolist() == [10, 20]
    assert np.allclose(front.y, [1.5, 1.2])
    assert (list(recorded.x), list(recorded.y), list(recorded.customdata)) == ([40], [1.0], [-1])
    assert figure.layout.shapes[0].x0 == 22
    assert figure.layout.annotations[0].text == "budget 22.00 MiB"


def test_a_plan_no_better_than_the_recorded_step_is_off_the_front() -> None:
    """Doing something that saves nothing is not recommended."""
    rest, front, _ = pareto(_plans((40 * MIB, 1.0), (50 * MIB, 0.9)), 40 * MIB, 22 * MIB, LIGHT).data
    assert list(rest.customdata) == [0]
    assert list(front.customdata) == [1]


def test_chosen_and_measured_are_marked() -> None:
    """The chosen plan is ringed, and a run under a plan stands where it was measured."""
    run = Measured("<i>run</i>", 12 * MIB, 1.4)
    figure = pareto(_plans((10 * MIB, 1.5)), 40 * MIB, 22 * MIB, LIGHT, chosen=0, measured=[run])
    measured, ring = figure.data[-2:]
    assert (list(measured.x), list(measured.y)) == ([12], [1.4])
    assert measured.name == "measured: &lt;i&gt;run&lt;/i&gt;"
    assert (list(ring.x), list(ring.y), ring.name) == ([10], [1.5], "chosen")


def test_many_plans_stay_a_small_picture() -> None:
    """Ten thousand plans are drawn as the front and as many others as a reader can distinguish."""
    count = 10_000
    peaks = np.arange(count, 0, -1) * MIB
    plans = Plans(peaks, np.full(count, 1.5), [f"checkpoint layers.{at}" for at in range(count)])
    figure = pareto(plans, 2 * count * MIB, MIB, LIGHT)
    assert len(figure.data[0].x) == MOST_DOMINATED
    assert len(_text(figure)) < 150_000


def test_planners_are_lines_over_the_budget() -> None:
    """Each planner is a line in per cent, with a gap where it found nothing; the bound is below."""
    shares = np.array([0.9, 0.5])
    lines = [PlannerLine("sqrt", shares, np.array([0.1, float("nan")]), ["done", "nothing fits"])]
    bound, line = planner_lines(lines, (shares, np.array([0.0, 0.05])), LIGHT).data
    assert np.allclose(line.y, [10, np.nan], equal_nan=True)
    assert np.allclose(line.x, [90, 50])
    assert np.allclose(bound.x, [50])
    assert np.allclose(bound.y, [5])


def test_planners_that_found_nothing_are_a_sentence() -> None:
    """No empty frame where no budget can be kept."""
    lines = [PlannerLine("sqrt", np.array([0.3]), np.array([float("nan")]), ["infeasible"])]
    assert not planner_lines(lines, (np.array([0.3]), np.array([0.0])), LIGHT).data


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (SearchForm("", ("checkpoint",)), "enter a budget"),
        (SearchForm("lots", ("checkpoint",)), "is not a size"),
        (SearchForm("-3GiB", ("checkpoint",)), "must be positive"),
        (SearchForm("60%", ()), "at least one policy"),
        (SearchForm("60%", ("teleport",)), "unknown policy 'teleport'"),
    ],
)
def test_mistakes_in_the_form_are_told(asked: SearchForm, sentence: str) -> None:
    """Invalid input is refused with a message before the search."""
    with pytest.raises(MemprofError, match=sentence):
        asked.check()


def test_a_search_finds_what_the_command_line_finds(rank: Rank, found: Suggestion) -> None:
    """The fastest plan is within 60 % of the recorded peak, and its step is the one that is drawn."""
    peak = live_bytes(rank.trace.steady_step()).during.max()
    best = found.answer.best
    assert best is not None
    assert best.peak_bytes <= found.answer.search_request.budget_bytes == int(peak * 60 // 100)
    detail = detail_of(rank, found, best)
    assert detail.predicted.max() == best.peak_bytes
    assert detail.recorded.max() == peak
    assert detail.policies.rows[-1].item.peak_allocated_bytes == best.peak_bytes
    assert {policy.name for one in plans_of(found) for policy in one.policies} == {"checkpoint"}


def test_the_plan_to_download_is_the_plan_that_is_shown(rank: Rank, found: Suggestion) -> None:
    """The text of plan.toml reads back as the same policies, with the peak that was promised."""
    best = found.answer.best
    assert best is not None
    read = parse_plan(format_plan(detail_of(rank, found, best).plan))
    assert read.policies == best.policies
    assert read.prediction is not None
    assert read.prediction.peak_allocated_bytes == best.peak_bytes


def test_the_result_names_the_best_plan_and_is_small(found: Suggestion) -> None:
    """Verdict, plot and tables of a search are there in less than 150 kB; the best plan is chosen at first."""
    search: Search[object, Suggestion] = Search(1, Rank(Trace.open(GPT)), "60%", lambda _: found)
    search.result(5)
    result = plan_parts.result(search, found, is_old=True)  # type: ignore[arg-type]
    page = _text(result)
    best = found.answer.best
    assert best is not None
    assert plan_parts.verdict(found) in text_of(result)
    assert f'"data": {plans_of(found).index(best)}' in page
    assert "search again" in page
    assert len(page) < 150_000


def test_plans_have_the_columns_of_the_command(found: Suggestion) -> None:
    """Command and page draw one table; the page has room for what text leaves out."""
    fitting, others = rows_of_search(found)
    tables = plan_tables(fitting, others, shortest_refused(found))
    page = text_of(plan_parts.result_tables(found))
    for title, table, _ in tables:
        assert (title in page) == bool(table)
    headings = [column.heading for column in tables[0][1].columns]
    assert headings == ["", "plan", "peak", "saved", "step time", "change", "peak in", "source", "numerics"]
    text = Page(is_terminal=False, width=300, has_colour=False)
    text.add(tables[0][1])
    assert text.render().splitlines()[0].split() == " ".join(headings).split()
    for heading in headings:
        assert heading in page


def test_an_imported_snapshot_has_the_search_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plans of `memprof suggest`, in its words and tables."""
    trace = imported(tmp_path, training())
    found = find_changes(Rank(trace), SearchForm("62MiB", default_policies()))
    assert main(["suggest", str(trace.path), "--budget", "62MiB", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert text_of(plan_parts.changes(found)).startswith("Within 62.00 MiB: ")
    page = _text(plan_parts.changes(found))
    assert [one.what for one in found.fitting] == [plan["describe"] for plan in told["plans"] if plan["fits"]]
    for each in (*(one.what for one in found.fitting), "expandable", told["needs"]):
        assert each in page


def test_a_dry_run_is_followed_by_another_under_the_plan(rank: Rank) -> None:
    """On its device, and then by the real run; page and command have one text for it."""
    manifest = rank.trace.manifest
    (train,) = commands_under(manifest, "plan.toml")
    dry = dataclasses.replace(
        manifest,
        backend=dataclasses.replace(manifest.backend, name=DRY_RUN),
        machine=dataclasses.replace(manifest.machine, device_name="RTX 4090", device_kind="cuda"),
    )
    first, last = commands_under(dry, "plan.toml")
    assert train == last
    assert first == train.replace("record", "record --dry-run --device 'RTX 4090'")


def test_what_is_not_possible_is_a_table_beside_the_plans(found: Suggestion) -> None:
    """Its rows have no plan to choose: they are words, the plan and why not."""
    answer = dataclasses.replace(found.answer, refused=(("compile the whole model", "it cannot be predicted"),))
    page = _text(plan_parts.result_tables(dataclasses.replace(found, answer=answer)))
    assert "compile the whole model" in page
    assert "it cannot be predicted" in page


def test_nothing_that_fits_says_the_least(rank: Rank) -> None:
    """Where no plan fits, the verdict names the least peak found and what is held there."""
    found = find_plans(rank, SearchForm("1MiB", ("checkpoint",)), NONE, lambda _: None)
    assert found.answer.best is None
    assert "No plan found fits 1.00 MiB: the lowest peak is" in plan_parts.verdict(found)
    tables = _text(plan_parts.result_tables(found))
    assert "over by" in tables
    assert "Plans that fit" not in tables


def test_a_job_that_fits_is_told(rank: Rank) -> None:
    """A budget above the peak needs no plan, and the page says so."""
    found = find_plans(rank, SearchForm("1GiB", ("checkpoint",)), NONE, lambda _: None)
    assert plan_parts.verdict(found).startswith("The job already fits")
    assert plans_of(found) == ()


def test_a_search_is_stopped_with_what_it_has(rank: Rank) -> None:
    """Stopping after some plans ends the search: those that were replayed are the answer."""
    begun, go_on = threading.Event(), threading.Event()

    def work(report: Callable[[object], None]) -> Suggestion:
        replayed: list[object] = []

        def slowly(one: object) -> None:
            replayed.append(one)
            if len(replayed) == 6:
                begun.set()
                assert go_on.wait(30)
            report(one)

        return find_plans(rank, SearchForm("20%", ("checkpoint", "swap")), NONE, slowly)

    search: Search[object, Suggestion] = Search(1, rank, "20%", work)
    assert begun.wait(30)
    assert search.is_running
    with pytest.raises(TimeoutError):
        search.result()
    search.stop()
    go_on.set()
    found = search.result(30)
    assert found.answer.was_interrupted
    assert len(search.found) == 6
    assert found.answer.tried == 6
    assert "stopped early" in _text(plan_parts.summary(found))


def test_a_comparison_is_stopped_with_what_it_has(rank: Rank) -> None:
    """The planners that answered before the stop are shown."""
    answers: list[object] = []

    def report(point: object) -> None:
        answers.append(point)
        if len(answers) == 3:
            raise KeyboardInterrupt

    points = run_planners(rank, report)
    assert list(points) == answers
    assert len(points) == 3
    assert "overhead by planner and budget" in _text(plan_parts.planner_table(points))


def test_a_search_that_fails_raises_where_it_is_read(rank: Rank) -> None:
    """A damaged recording's sentence reaches the page, and not only the thread."""

    def work(_: object) -> Suggestion:
        raise BadInputError("it is damaged")

    search: Search[object, Suggestion] = Search(1, rank, "60%", work)
    with pytest.raises(BadInputError, match="it is damaged"):
        search.result(10)
    assert not search.is_running


def test_searches_are_kept_by_recording(rank: Rank) -> None:
    """The latest of each recording is found again; a new one takes its place and stops it; old ones are dropped."""
    searches: Searches[object, int] = Searches()
    release = threading.Event()
    first = searches.start("a", rank, "60%", lambda _: int(release.wait(30)))
    second = searches.start("a", rank, "50%", lambda _: 2)
    assert first.was_stopped
    assert searches.latest("a") is second
    assert searches.latest("b") is None
    assert second.result(10) == 2
    running = searches.start("r", rank, "60%", lambda _: int(release.wait(30)))
    for key in range(10):
        searches.start(key, rank, "60%", lambda _: 3).result(10)
    assert searches.latest("a") is None
    assert searches.latest(0) is None
    assert searches.latest("r") is running
    assert searches.latest(9) is not None
    release.set()


def _run_of(made: Forecast, path: str, *, extra_bytes: int = 0) -> Source:
    """A recording that is what was predicted, but for a peak that the plan in it promised lower by some bytes."""
    manifest, tables = predicted_trace(made)
    promised = dict((manifest.plan or {})["prediction"])
    promised["peak_allocated_bytes"] -= extra_bytes
    plan = json.loads(json.dumps({**(manifest.plan or {}), "prediction": promised}))  # as a file holds it
    manifest = dataclasses.replace(manifest, plan=plan, backend=made.manifest.backend)
    return Source(Path(path), path, Trace.of([(manifest, tables)], path))


def test_runs_under_a_plan_stand_beside_the_recording(rank: Rank) -> None:
    """Another recording of the same model under a plan shows what was promised against what was measured."""
    made = forecast(rank.trace, Plan((Checkpoint(("layers.*",)),)))
    recorded = Source(GPT, "gpt", rank.trace)
    sources = [
        recorded,
        _run_of(made, "exact.memprof"),
        _run_of(made, "off.memprof", extra_bytes=MIB),
        Source(LSTM, "lstm", Trace.open(LSTM)),
    ]
    exact, off = runs_under_plans(Workspace(sources), View())
    assert exact.name == "exact.memprof"
    assert exact.plan == "checkpoint layers.*"
    assert exact.found is not None
    assert exact.found.peak_error_bytes == 0
    assert off.found is not None
    assert off.found.peak_error_bytes == -MIB
    page = _text(WhatIf().layout(Workspace(sources), View()))
    assert "Verified runs" in page
    assert "-1.00 MiB" in page
    assert "lstm" not in _text(plan_parts.run_table((exact, off)))


def test_a_prediction_is_no_run(rank: Rank) -> None:
    """A trace that was predicted is not shown as one that was measured, nor is one of another model."""
    manifest, tables = predicted_trace(forecast(rank.trace, Plan((Checkpoint(("layers.*",)),))))
    predicted = Source(Path("p"), "p", Trace.of([(manifest, tables)], "p"))
    assert runs_under_plans(Workspace([Source(GPT, "gpt", rank.trace), predicted]), View()) == ()
    assert runs_under_plans(Workspace([Source(LSTM, "lstm", Trace.open(LSTM)), predicted]), View()) == ()


def test_a_run_whose_plan_cannot_be_read_says_why(rank: Rank) -> None:
    """A plan of a newer version does not hide the others: its row carries the sentence."""
    made = forecast(rank.trace, Plan((Checkpoint(("layers.*",)),)))
    source = _run_of(made, "newer.memprof")
    trace = source.trace
    newer = Trace.of([(dataclasses.replace(trace.manifest, plan={"teleport": {}}), predicted_trace(made)[1])], "newer")
    (run,) = runs_under_plans(Workspace([Source(GPT, "gpt", rank.trace), Source(Path("n"), "n", newer)]), View())
    assert run.found is None
    assert "teleport" in run.refusal
    assert "teleport" in _text(plan_parts.run_table((run,)))
