"""Ranks read in parallel through Dask: the results are the same with any reader."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from memprof.errors import BadInputError, UsageError
from memprof.trace.manifest import Manifest
from memprof.trace.schema import Ops
from memprof.trace.store import Trace, write_trace
from tests.building import Op, Storage, make_tables

pytest.importorskip("dask")

from memprof.analysis.ranks.distributed_reading import map_ranks, peak_curve, read_frame


def ops_of(trace: Trace) -> tuple[int, int]:
    return trace.rank, len(trace.table(Ops))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of two ranks each; a rank holds 10 bytes for each rank before it, and 4 more in its first op."""
    for node in range(3):
        ranks = []
        for rank in (2 * node, 2 * node + 1):
            tables = make_tables(
                [[Op(makes=["a"], frees=["a"]), Op(phase="optimizer", mutates=["w"])]],
                [Storage("w", 10 * rank, "parameter"), Storage("a", 4)],
            )
            ranks.append((Manifest(rank=rank, world_size=6), tables))
        write_trace(tmp_path / f"run.node{node}.memprof", ranks)
    return tmp_path


@pytest.mark.parametrize("scheduler", [None, "synchronous", "threads"])
@pytest.mark.parametrize("per_task", [1, 4, 32])
def test_every_rank_is_read_once(folder: Path, scheduler: str | None, per_task: int) -> None:
    """Answers come by rank, whatever schedules the tasks and however many ranks one of them reads."""
    found = map_ranks(folder, ops_of, scheduler=scheduler, per_task=per_task)
    assert found == {rank: (rank, 2) for rank in range(6)}
    assert list(found) == [0, 1, 2, 3, 4, 5]


def test_a_cluster_gives_the_same(folder: Path) -> None:
    """Two workers, processes of their own, answer as this process does."""
    distributed = pytest.importorskip("distributed")
    curve = functools.partial(peak_curve, stretches=8)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, processes=True) as cluster,
        distributed.Client(cluster),
    ):
        found = map_ranks(folder / "run.memprof", curve, per_task=1)
    assert found == map_ranks(folder, curve, scheduler="synchronous")
    assert found[3] == [34, 30]


def test_chosen_ranks_alone_are_read(folder: Path) -> None:
    """Ranks may be named; a missing one is reported."""
    assert set(map_ranks(folder, ops_of, ranks=[1, 4], scheduler="synchronous")) == {1, 4}
    with pytest.raises(UsageError, match="has no rank 9"):
        map_ranks(folder, ops_of, ranks=[9], scheduler="synchronous")


def test_a_table_of_all_ranks_is_a_dask_frame(folder: Path) -> None:
    """The frame has the rank in addition to the requested columns, and is computed like any other."""
    frame = read_frame(folder, Ops, ["op_id", "phase"], per_task=4)
    assert list(frame.columns) == ["rank", "op_id", "phase"]
    whole = frame.compute(scheduler="synchronous")
    assert len(whole) == 12
    counts = frame.groupby(["rank", "phase"]).op_id.count().compute(scheduler="synchronous")
    assert counts.to_dict() == {(rank, phase): 1 for rank in range(6) for phase in ("forward", "optimizer")}


def test_a_damaged_rank_is_told(folder: Path) -> None:
    """An error in a task is the error that reading here would be."""
    (folder / "run.node1.memprof").write_bytes(b"PK\x03\x04")
    with pytest.raises(BadInputError, match="is damaged"):
        map_ranks(folder, ops_of, scheduler="synchronous")


def test_without_dask_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what to install."""
    monkeypatch.setitem(__import__("sys").modules, "dask.base", None)
    with pytest.raises(UsageError, match=r"pip install 'torch-memprof\[distributed\]'"):
        map_ranks(folder, ops_of)
