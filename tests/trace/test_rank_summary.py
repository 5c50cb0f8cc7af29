"""The summaries of each rank: enough to compare a thousand, and consistent with its tables."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from memprof.errors import BadInputError
from memprof.replay.live import live_bytes
from memprof.trace.files.archive import Archive
from memprof.trace.manifest import Capture, Manifest
from memprof.trace.schema import NONE, RANK_TABLES, RankCollectives, RankCurve, RankMoments, RankParts, Ranks
from memprof.trace.store import Trace, write_trace
from tests.building import Module, Op, Storage, Tables, make_tables


def job(activation: int, collectives: bool = True) -> Tables:
    """One step: 10 bytes of weight in fc, an activation of fc in forward, a gradient of 2 beside it in backward."""
    exchange = [Op(name="c10d.allreduce_.default", phase="backward", kind="collective", reads=["g"])]
    return make_tables(
        [
            [
                Op(module="fc", makes=["a"], reads=["w"]),
                Op(phase="backward", module="fc", makes=["g"], reads=["a"], workspace=1),
                *(exchange if collectives else []),
                Op(phase="optimizer", reads=["g"], mutates=["w"], frees=["g", "a"]),
            ]
        ],
        [
            Storage("w", 10, "parameter", module="fc"),
            Storage("a", activation, module="fc"),
            Storage("g", 2, "gradient", module="fc"),
        ],
        modules=[Module("", "Net"), Module("fc")],
    )


def manifest(rank: int, **changes: object) -> Manifest:
    return dataclasses.replace(
        Manifest(rank=rank, world_size=3, node=f"node{rank // 2}", clock=f"clock{rank // 2}"), **changes
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.memprof"
    write_trace(path, [(manifest(rank), job(size)) for rank, size in enumerate((4, 20, 6))])
    return path


def test_a_rank_is_summed_up_by_its_steady_step(file: Path) -> None:
    """Peak, node and clock of each rank stand in one row: 10 + activation + 2 + 1 of workspace."""
    ranks = Trace.open(file).summary(Ranks)
    assert ranks.rank.tolist() == [0, 1, 2]
    assert ranks.peak_bytes.tolist() == [17, 33, 19]
    assert ranks.node.tolist() == ["node0", "node0", "node1"]
    assert ranks.clock.tolist() == ["clock0", "clock0", "clock1"]
    assert ranks.ops.tolist() == [4, 4, 4]
    assert ranks.step.tolist() == ranks.last_step.tolist() == [0, 0, 0]


def test_moments_and_parts_are_of_the_peak(file: Path) -> None:
    """The peak is in backward, its parts sum to it by category and by module; each phase has its peak."""
    trace = Trace.open(file)
    moments, parts = trace.summary(RankMoments), trace.summary(RankParts)
    of_one = moments.rank == 1
    assert dict(zip(moments.phase[of_one], moments.allocated_bytes[of_one].tolist(), strict=True)) == {
        "": 33,
        "forward": 30,
        "backward": 33,
        "optimizer": 32,
    }
    assert moments.in_phase[of_one][0] == "backward"
    assert moments.module[of_one][0] == "fc"
    held = parts.take((parts.rank == 1) & (parts.kind == "category"))
    assert dict(zip(held.name, held.allocated_bytes.tolist(), strict=True)) == {
        "activation": 20,
        "parameter": 10,
        "gradient": 2,
        "workspace": 1,
    }
    assert parts.allocated_bytes[(parts.rank == 1) & (parts.kind == "module")].tolist() == [33]


def test_the_curve_is_the_steps_own(file: Path) -> None:
    """A step of fewer operators than stretches has one stretch for each."""
    trace = Trace.open(file).rank_trace(2)
    curve = trace.summary(RankCurve)
    during = live_bytes(trace.steady_step()).during
    assert curve.allocated_bytes[curve.rank == 2].tolist() == during.tolist()


def test_collectives_tell_when_they_were_over(file: Path) -> None:
    """On CPU a collective is over when the update begins, which needs what was communicated."""
    trace = Trace.open(file)
    found = trace.summary(RankCollectives)
    assert found.rank.tolist() == [0, 1, 2]
    assert found.name.tolist() == ["c10d.allreduce_.default"] * 3
    step = trace.steady_step()
    assert found.start_us[0] == step.ops.start_us[2]
    assert found.over_us[0] == step.ops.start_us[3]


def test_a_summary_is_the_same_however_the_recording_lies(file: Path, tmp_path: Path) -> None:
    """One file, a file a rank, and tables in memory without any summary tell the same."""
    whole = Trace.open(file)
    folder = tmp_path / "parts"
    folder.mkdir()
    for rank, size in enumerate((4, 20, 6)):
        write_trace(folder / f"run.rank{rank}.memprof", [(manifest(rank), job(size))])
    in_memory = Trace.of([(manifest(rank), job(size)) for rank, size in enumerate((4, 20, 6))], "memory")
    for other in (Trace.open(folder), Trace.open(folder / "run.memprof"), in_memory):
        assert other.ranks == (0, 1, 2)
        for kind in RANK_TABLES:
            one, two = whole.summary(kind), other.summary(kind)
            for column in kind.columns():
                left, right = getattr(one, column.name), getattr(two, column.name)
                assert np.array_equal(left, right, equal_nan=column.kind == "float"), column.name


def test_ranks_that_are_numbered_anew_are_in_the_summary_too(tmp_path: Path) -> None:
    """Two files that both say rank 0 become ranks 0 and 1, in their summaries as well."""
    for name, size in (("a", 4), ("b", 20)):
        write_trace(tmp_path / f"{name}.memprof", [(Manifest(world_size=2, pid=size), job(size))])
    trace = Trace.open(tmp_path)
    ranks = trace.summary(Ranks)
    assert (trace.ranks, ranks.rank.tolist(), ranks.peak_bytes.tolist()) == ((0, 1), [0, 1], [17, 33])


def test_a_rank_without_operators_is_there_without_figures(tmp_path: Path) -> None:
    """A rank that died before its first operator has a row, and says where it ended."""
    dead = manifest(1, capture=Capture(False, "", "the job was killed by SIGKILL", -9))
    write_trace(tmp_path / "run.memprof", [(manifest(0), job(4)), (dead, {})])
    ranks = Trace.open(tmp_path / "run.memprof").summary(Ranks)
    assert ranks.peak_bytes.tolist() == [17, NONE]
    assert ranks.is_complete.tolist() == [True, False]
    assert ranks.ends_at.tolist() == ["", "the job was killed by SIGKILL"]


def test_a_process_alone_carries_no_summary(tmp_path: Path) -> None:
    """The file of a job of one process is as small as it was."""
    write_trace(tmp_path / "run.memprof", [(Manifest(), job(4))])
    assert not any(name.startswith("rank_") for name in Archive.open(tmp_path / "run.memprof").entries)


def test_the_worst_of_many_is_found_without_their_tables(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing ranks reads the summaries alone."""
    from memprof.analysis.ranks.rank_report import compare_ranks

    read = Archive.read
    seen: list[str] = []

    def watched(self: Archive, name: str) -> bytes:
        seen.append(name)
        return read(self, name)

    monkeypatch.setattr(Archive, "read", watched)
    assert compare_ranks(Trace.open(file)).worst == 1
    assert {name for name in seen if "/" in name} == set()


def test_ranks_are_written_one_at_a_time(tmp_path: Path) -> None:
    """A rank's tables are let go before the next rank's are made."""
    import gc
    import weakref

    alive: list[int] = []
    made: list[weakref.ref[object]] = []

    def ranks() -> object:
        for rank in range(4):
            gc.collect()
            alive.append(sum(one() is not None for one in made))
            tables = job(4)
            made.append(weakref.ref(next(iter(tables.values()))))
            yield manifest(rank), tables
            del tables

    write_trace(tmp_path / "run.memprof", ranks())
    assert max(alive) <= 1


def test_a_damaged_summary_is_told(file: Path) -> None:
    """A summary that cannot be read is an error of ours that names it."""
    data = file.read_bytes()
    start = data.index(b"ranks.parquet")
    file.write_bytes(data[: start + 40] + b"\xff" * 20 + data[start + 60 :])
    with pytest.raises(BadInputError, match="is damaged"):
        Trace.open(file).summary(Ranks)
