"""A trace, opened."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from memprof.errors import BadInputError, NotStartedError, UsageError
from memprof.trace.consistency import InvariantError, check_tables
from memprof.trace.manifest import Capture, Manifest
from memprof.trace.schema import NONE, Ops, Saved, Segments, Steps, Storages, Table, Uses
from memprof.trace.store import Trace, write_trace
from tests.building import Op, Storage, Tables, make_tables, make_trace


def test_tables_are_read_when_asked_for(small_file: Path) -> None:
    """Opening reads the manifests alone; a table is read once."""
    trace = Trace.open(small_file)
    assert (trace.path, trace.rank, trace.ranks) == (small_file, 0, (0,))
    assert trace.manifest.pid == 7
    assert trace.table(Ops) is trace.table(Ops)
    assert len(trace.table(Segments)) == 0


def test_frame_has_the_tables_columns(small_file: Path) -> None:
    """A frame has the schema's columns in order, with the table's values."""
    frame = Trace.open(str(small_file)).frame(Ops)
    assert list(frame.columns) == [column.name for column in Ops.columns()]
    assert frame.name.tolist() == ["aten.mm.default", "aten.mm.default", "aten.add_.Tensor"] * 2
    assert frame.forward_op_id.tolist() == [-1, 0, -1, -1, 3, -1]


def test_ranks_of_one_file(tmp_path: Path, small_tables: Tables) -> None:
    """One file holds several ranks; the lowest is open at first, and each leads to the others."""
    path = tmp_path / "run.memprof"
    write_trace(path, [(Manifest(rank=3, pid=30), small_tables), (Manifest(rank=1, pid=10), {})])
    trace = Trace.open(path)
    assert (trace.ranks, trace.rank, trace.manifest.pid) == ((1, 3), 1, 10)
    assert len(trace.table(Ops)) == 0
    other = trace.rank_trace(3)
    assert (other.manifest.pid, len(other.table(Ops))) == (30, 6)
    assert Trace.open(path, rank=3).manifest.pid == 30
    with pytest.raises(UsageError, match=r"has no rank 0; it has ranks 1, 3\."):
        Trace.open(path, rank=0)
    with pytest.raises(UsageError, match=r"has no rank 7; it has ranks 1, 3\."):
        other.rank_trace(7)


def test_a_folder_of_files_is_one_trace(tmp_path: Path, small_tables: Tables) -> None:
    """A folder with a file for each rank opens like one file with all ranks."""
    for rank in (2, 0, 1):
        write_trace(tmp_path / f"rank{rank}.memprof", [(Manifest(rank=rank, pid=rank * 10), small_tables)])
    (tmp_path / "notes.txt").write_text("not a trace")
    trace = Trace.open(tmp_path)
    assert trace.ranks == (0, 1, 2)
    assert [trace.rank_trace(rank).manifest.pid for rank in trace.ranks] == [0, 10, 20]
    assert len(trace.rank_trace(2).table(Ops)) == 6
    with pytest.raises(UsageError, match=r"has no rank 7; it has ranks 0 to 2\."):
        trace.rank_trace(7)
    (tmp_path / "rank1.memprof").unlink()
    (tmp_path / "rank0.memprof").unlink()
    with pytest.raises(UsageError, match=r"has no rank 0; it has only rank 2\."):
        Trace.open(tmp_path, rank=0)


def test_files_of_equal_rank_are_numbered(tmp_path: Path, small_tables: Tables) -> None:
    """Files that all say rank 0 are numbered by name, and say so."""
    for name, pid in (("a", 10), ("b", 20)):
        write_trace(tmp_path / f"{name}.memprof", [(Manifest(pid=pid), small_tables)])
    trace = Trace.open(tmp_path)
    assert trace.ranks == (0, 1)
    second = trace.rank_trace(1)
    assert (second.manifest.pid, second.manifest.rank, len(second.table(Ops))) == (20, 1, 6)
    assert second.manifest.notes == ("Several processes were recorded as rank 0; process 20 is 1 here.",)


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    """A folder with neither traces nor a spool is reported as such."""
    with pytest.raises(BadInputError, match=r"holds no \.memprof file, nor the spool of a recording\.$"):
        Trace.open(tmp_path)


def test_a_damaged_file_in_a_folder_is_named(tmp_path: Path, small_tables: Tables) -> None:
    """One bad file in a folder is an error that names it, not a rank left out in silence."""
    write_trace(tmp_path / "a.memprof", [(Manifest(), small_tables)])
    (tmp_path / "b.memprof").write_bytes(b"")
    with pytest.raises(BadInputError, match=r"b\.memprof is empty\.$"):
        Trace.open(tmp_path)


@pytest.mark.parametrize(
    ("ended", "sentence"),
    [
        ({"returncode": 1, "ended_us": 5.0}, "python train.py ended with status 1, and none of its processes"),
        ({"returncode": -9, "ended_us": 5.0}, "python train.py was ended by signal 9, and none of its processes"),
        (None, "python train.py ended without finishing its recording, and none of its processes"),
    ],
)
def test_a_spool_without_a_recording_says_what_became_of_the_job(
    tmp_path: Path, ended: dict[str, float] | None, sentence: str
) -> None:
    """A spool no process wrote into is refused with the command and how it ended."""
    (tmp_path / "launch.json").write_text(json.dumps({"command": ["python", "train.py"], "target": "train.py"}))
    if ended is not None:
        (tmp_path / "exit.json").write_text(json.dumps(ended))
    with pytest.raises(BadInputError, match="holds no recording: " + sentence):
        Trace.open(tmp_path)


def test_a_spool_of_a_job_that_has_not_trained_yet_is_told_apart(tmp_path: Path) -> None:
    """Its recording may still begin, as long as the memprof that started it runs."""
    launch = {"command": ["python", "train.py"], "parent_pid": os.getpid(), "started_us": time.time() * 1e6}
    (tmp_path / "launch.json").write_text(json.dumps(launch))
    with pytest.raises(NotStartedError, match=r"python train\.py is still running, and none of its processes"):
        Trace.open(tmp_path)


def test_a_damaged_spool_is_refused(tmp_path: Path) -> None:
    """A spool whose own files are damaged is an error of ours."""
    (tmp_path / "launch.json").write_text("{")
    with pytest.raises(BadInputError, match=r"launch\.json is damaged: it is not JSON\.$"):
        Trace.open(tmp_path)


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        (Storages, "created_op_id"),
        (Storages, "freed_op_id"),
        (Uses, "op_id"),
        (Uses, "storage_id"),
        (Saved, "forward_op_id"),
        (Saved, "storage_id"),
        (Saved, "released_op_id"),
    ],
)
def test_every_step_is_checked_without_cutting_it_out(small_tables: Tables, kind: type[Table], column: str) -> None:
    """Any one id changed to any other: all steps are accepted, or refused, as each is on its own."""
    refused, made = 0, [int(np.argmax(small_tables[Storages].created_op_id == op_id)) for op_id in (0, 3)]  # type: ignore[attr-defined]
    small_tables[Saved] = Saved.of(storage_id=made, forward_op_id=[0, 3], released_op_id=[1, 4])
    for row, value in itertools.product(range(len(small_tables[kind])), range(NONE, 6)):
        values = getattr(small_tables[kind], column).copy()
        values[row] = value
        tables = {**small_tables, kind: small_tables[kind].replace(**{column: values})}
        try:
            check_tables(tables)
        except InvariantError:  # never read from a file
            continue
        trace, sentence = Trace.of([(Manifest(), tables)], "run.memprof"), ""
        try:
            for number in trace.recorded_steps:
                trace.step(number)
        except BadInputError as error:
            sentence, refused = str(error), refused + 1
        with pytest.raises(BadInputError, match=f"^{re.escape(sentence)}$") if sentence else nullcontext():
            trace.check_steps()
    assert refused


def named(*names: str) -> list[Op]:
    return [Op(name) for name in names]


def test_recorded_steps_leave_the_warm_up_out() -> None:
    """Recorded steps are listed, warm-up steps only where there are no others, and never steps without operators."""
    kinds = ["warm_up", "timed", "recorded", "recorded", "plain"]
    trace = make_trace([named("a"), [], named("a"), named("a"), []], [], kinds=kinds)
    assert trace.recorded_steps == (2, 3)
    assert make_trace([named("a"), named("a")], [], kinds=["warm_up", "warm_up"]).recorded_steps == (0, 1)
    assert make_trace([[]], [], kinds=["plain"]).recorded_steps == ()


def test_the_steady_step_is_the_last_of_the_usual_ones() -> None:
    """A step with other operators, as one that evaluates, does not stand for all, be it the last."""
    steps = [named("x", "x", "x"), named("a", "b"), named("b", "a"), named("a", "b"), named("a", "b", "evaluate")]
    assert make_trace(steps, []).steady_step().number == 3


def test_the_steady_step_is_the_later_on_a_tie() -> None:
    """Where no two steps are alike the last one stands for all."""
    assert make_trace([named("a"), named("b"), named("c")], []).steady_step().number == 2


@pytest.mark.parametrize(
    ("kinds", "is_complete", "number"),
    [
        (["recorded", "recorded", "recorded"], [True, True, False], 1),  # killed within the last
        (["warm_up", "recorded", "recorded"], [True, False, False], 2),  # an incomplete one goes before the warm-up
        (["warm_up", "warm_up", "plain"], [True, True, True], 1),  # nothing else
        (["warm_up", "warm_up", "plain"], [False, False, True], 1),
    ],
)
def test_the_steady_step_is_complete_and_recorded_if_any_is(
    kinds: list[str], is_complete: list[bool], number: int
) -> None:
    """Complete steps go before incomplete ones, recorded before warm-up."""
    tables = make_tables([named("a")] * 3, [], kinds=kinds)
    tables[Steps] = tables[Steps].replace(is_complete=np.array(is_complete))
    assert Trace.of([(Manifest(), tables)], "run.memprof").steady_step().number == number


def test_a_trace_without_operators_has_no_steady_step() -> None:
    """Where nothing was recorded the error says why."""
    with pytest.raises(BadInputError, match="holds no operators: the job ran no training step while it was recorded"):
        make_trace([[]], [], kinds=["plain"]).steady_step()
    early = Manifest(capture=Capture(is_complete=False, ends_at="step 0, forward", reason="killed by signal 9"))
    with pytest.raises(BadInputError, match=r"the recording ended early in step 0, forward \(killed by signal 9\)\."):
        make_trace([[]], [Storage("w", 1)], manifest=early).steady_step()
