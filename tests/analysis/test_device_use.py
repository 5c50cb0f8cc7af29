"""The breakdown of a device's memory as nvidia-smi shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.analysis.report.whole_run import summarise_devices
from memprof.cli.main import main
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, DeviceMemory
from memprof.trace.store import write_trace
from tests.building import Tables

GIB = 2**30


def samples(*rows: tuple[int, int, int]) -> DeviceMemory:
    """Samples of a device of 24 GiB: used, of this process, reserved."""
    used, process, reserved = zip(*rows, strict=True)
    count = len(rows)
    return DeviceMemory.of(
        time_us=list(range(count)),
        device=["cuda:0"] * count,
        total_bytes=[24 * GIB] * count,
        used_bytes=used,
        process_bytes=process,
        reserved_bytes=reserved,
        pinned_bytes=[NONE] * (count - 1) + [GIB],
    )


def test_the_parts_sum_to_the_device() -> None:
    """Reserved, the rest of this process, others, free: at the sample in which most was used."""
    (use,) = summarise_devices(samples((2 * GIB, 2 * GIB, GIB), (13 * GIB, 11 * GIB, 10 * GIB)))
    assert (use.reserved_bytes, use.own_bytes, use.other_bytes, use.free_bytes) == (10 * GIB, GIB, 2 * GIB, 11 * GIB)
    assert use.used_bytes == 13 * GIB
    assert use.pinned_bytes == GIB


def test_where_the_driver_does_not_tell_processes_apart() -> None:
    """Without per-process figures, as in containers, all memory outside torch's segments is in one row."""
    (use,) = summarise_devices(samples((13 * GIB, NONE, 10 * GIB)))
    assert use.own_bytes is None
    assert use.other_bytes == 3 * GIB
    assert use.reserved_bytes + use.other_bytes + use.free_bytes == use.total_bytes


def test_figures_of_two_moments_never_go_below_nothing() -> None:
    """torch's count may be newer than the driver's."""
    (use,) = summarise_devices(samples((9 * GIB, 8 * GIB, 10 * GIB)))
    assert (use.reserved_bytes, use.own_bytes, use.other_bytes) == (9 * GIB, 0, 0)


def test_it_is_in_the_report(tmp_path: Path, small_tables: Tables, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of its own, whose rows sum to the whole device; none on a processor."""
    path = tmp_path / "run.memprof"
    write_trace(path, [(Manifest(), {**small_tables, DeviceMemory: samples((13 * GIB, 11 * GIB, 10 * GIB))})])
    assert main(["report", str(path)]) == 0
    out = capsys.readouterr().out
    assert "All of cuda:0" in out
    assert "10.00 GiB" in out
    assert "in addition, pinned host memory" in out
    write_trace(path, [(Manifest(), small_tables)])
    main(["report", str(path)])
    assert "All of" not in capsys.readouterr().out
