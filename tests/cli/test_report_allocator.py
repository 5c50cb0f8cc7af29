"""`memprof report --allocator` and `--static` as they are typed and read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.analysis.allocator.allocator_report import build_allocator_report
from memprof.cli.main import main
from memprof.trace.manifest import Machine, Manifest
from memprof.trace.schema import Memory, Segments, Storages, Table
from memprof.trace.store import Trace, write_trace
from tests.building import Module, Op, Storage, Tables, make_tables

MIB = 2**20
SAMPLE = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"

#: Rising sizes, of which each fits in no hole that the one before left, while 8 MiB in between stay: the allocator
#: takes a new segment for every one, and one that grows does not.
RISING = [
    op
    for n in range(6)
    for op in (
        Op("aten.mm.default", makes=[f"big{n}"], module="layers.0", stack="/job/train.py:3:main"),
        Op("aten.add.Tensor", reads=[f"big{n}"], makes=[f"kept{n}"], frees=[f"big{n}"], stack="/job/train.py:4:main"),
    )
]
SIZES = [Storage(f"big{n}", (100 + 20 * n) * MIB) for n in range(6)]
KEPT = [Storage(f"kept{n}", 12 * MIB, "gradient", f"w{n}") for n in range(6)]


def write(path: Path, tables: Tables, machine: Machine | None = None, *, is_on_device: bool = True) -> Path:
    storages = tables[Storages]
    assert isinstance(storages, Storages)
    changed: dict[type[Table], Table] = dict(tables)
    if is_on_device:
        device = np.full(len(storages), "cuda:0", dtype=object)
        changed |= {Storages: dataclasses.replace(storages, device=device), Memory: Memory.empty()}
    write_trace(path, [(Manifest(target="train.py", machine=machine or Machine(device_kind="cuda")), changed)])
    return path


@pytest.fixture
def fragmented(tmp_path: Path) -> Path:
    ops = [*RISING, Op(frees=[f"kept{n}" for n in range(6)])]
    return write(tmp_path / "rising.memprof", make_tables([ops], [*SIZES, *KEPT], [Module("layers.0")]))


def report(capsys: pytest.CaptureFixture[str], words: Sequence[object], status: int = 0) -> str:
    assert main(["report", *map(str, words)]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def as_json(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    return json.loads(report(capsys, [*words, "--json"]))


def test_fragmentation_is_found_and_a_setting_named(fragmented: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first lines say what is reserved, what of it is unused, and which setting saves how much."""
    out = report(capsys, [fragmented, "--allocator"])
    found = as_json(capsys, fragmented, "--allocator")
    first, advice = out.splitlines()[:2]
    assert first.startswith("Step 0 reserves ")
    assert advice.startswith("Set PYTORCH_ALLOC_CONF=expandable_segments:True: reserved memory peaks at ")
    now, best = found["under_settings"][0], found["under_settings"][1]
    assert best["settings"] == found["best_settings"] == "expandable_segments:True"
    assert best["reserved_peak_bytes"] < now["reserved_peak_bytes"] == found["reserved_peak_bytes"]
    assert found["allocated_peak_bytes"] <= best["reserved_peak_bytes"]


def test_a_setting_is_advised_only_where_it_beats_what_was_recorded(tmp_path: Path) -> None:
    """If the device reserved less than modelled, a setting that only beats the modelled figure is not recommended."""
    ops = [*RISING, Op(frees=[f"kept{n}" for n in range(6)])]
    tables = make_tables([ops], [*SIZES, *KEPT], [Module("layers.0")])
    step = Trace.open(write(tmp_path / "rising.memprof", tables)).fullest_step()
    manifest = Manifest(machine=Machine(device_kind="cuda"))
    advised = build_allocator_report(step, manifest)
    assert advised.best is not None
    for recorded, is_advised in ((advised.best.reserved_peak, False), (advised.best.reserved_peak * 2, True)):
        memory = Memory.of(op_id=[0], device=["cuda:0"], reserved_bytes=[recorded])
        found = build_allocator_report(dataclasses.replace(step, memory=memory), manifest)
        assert (found.best is not None) == is_advised


def test_what_pins_segments_is_told(fragmented: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each segment with holes: the largest block in it, what it is, and the line that made it."""
    out = report(capsys, [fragmented, "--allocator"])
    assert "12.00 MiB gradient w" in out
    assert "train.py:4" in out
    segments = as_json(capsys, fragmented, "--allocator")["segments"]
    assert segments[0]["largest_block"] is None  # wholly free
    (shared,) = (one for one in segments if one["blocks"])
    assert shared["largest_block"]["requested_bytes"] == 12 * MIB
    assert [one["free_bytes"] for one in segments] == sorted((one["free_bytes"] for one in segments), reverse=True)


def test_parts_sum_to_what_is_reserved(fragmented: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Asked for, rounding, holes and free segments are all there is."""
    held = as_json(capsys, fragmented, "--allocator")["at_reserved_peak"]
    assert held["reserved_bytes"] == held["allocated_bytes"] + held["holes_bytes"] + held["idle_segments_bytes"]
    assert held["requested_bytes"] <= held["allocated_bytes"]


def test_a_step_on_cpu_is_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    """For a CPU recording, reserved bytes are labelled as hypothetical."""
    for kind in ("--allocator", "--static"):
        out = report(capsys, [SAMPLE, kind])
        assert "would reserve 106.00 MiB" in out.splitlines()[0]
        assert "recorded on CPU" in out
    assert as_json(capsys, SAMPLE, "--allocator")["is_as_if_on_cuda"] is True


def test_nothing_helps_where_memory_is_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two blocks that fill their segments: the advice is that no setting would help."""
    tables = make_tables([[Op(makes=["x"]), Op(makes=["y"])]], [Storage("x", 40 * MIB), Storage("y", 60 * MIB)])
    out = report(capsys, [write(tmp_path / "packed.memprof", tables), "--allocator"])
    assert out.splitlines()[1].startswith("No allocator setting would help")


def test_the_settings_in_force_are_the_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that had its segments grow already is compared with that."""
    machine = Machine(device_kind="cuda", allocator_settings="expandable_segments:True")
    ops = [*RISING, Op(frees=[f"kept{n}" for n in range(6)])]
    path = write(tmp_path / "growing.memprof", make_tables([ops], [*SIZES, *KEPT]), machine)
    found = as_json(capsys, path, "--allocator")
    assert found["under_settings"][0]["settings"] == "expandable_segments:True"
    assert found["best_settings"] is None
    assert [one["settings"] for one in found["under_settings"]].count("expandable_segments:True") == 1


def test_predicted_steps_have_reserved_bytes_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A predicted step is replayed like a recorded one, under the allocator's options of its plan."""
    predicted = tmp_path / "predicted.memprof"
    words = ["--checkpoint", "layers.*", "--allocator", "expandable_segments", "-o", str(predicted)]
    assert main(["predict", str(SAMPLE), *words]) == 0
    capsys.readouterr()
    before, found = as_json(capsys, SAMPLE, "--allocator"), as_json(capsys, predicted, "--allocator")
    assert found["settings"] == "expandable_segments:True"
    assert found["allocated_peak_bytes"] < before["allocated_peak_bytes"]
    assert found["reserved_peak_bytes"] < before["reserved_peak_bytes"]


def test_a_device_that_is_full_gives_back_what_is_cached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With 700 MiB of memory the same job goes on, and the table says how often the cache had to go."""
    machine = Machine(device_kind="cuda", capacity_bytes=700 * MIB)
    ops = [*RISING, Op(frees=[f"kept{n}" for n in range(6)])]
    path = write(tmp_path / "full.memprof", make_tables([ops], [*SIZES, *KEPT]), machine)
    now = as_json(capsys, path, "--allocator")["under_settings"][0]
    assert now["reserved_peak_bytes"] <= 700 * MIB
    assert now["retries"] > 0
    assert now["failed_allocations"] == 0
    assert "cache emptied" in report(capsys, [path, "--allocator"])


@pytest.mark.parametrize(
    "settings", ["max_split_size_mb:large", "garbage_collection_threshold:much", "roundup_power2_divisions:[256]"]
)
def test_settings_that_make_no_sense_are_named(
    settings: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recording with options that torch would not take is refused with one sentence."""
    machine = Machine(device_kind="cuda", allocator_settings=settings)
    path = write(tmp_path / "odd.memprof", make_tables([[Op(makes=["x"])]], [Storage("x", MIB)]), machine)
    assert settings in report(capsys, [path, "--allocator"], status=5)
    assert main(["export", str(path), "--to", "snapshot", "-o", str(tmp_path / "s.pickle")]) == 5


def test_of_several_ranks_the_fullest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in the report; another is asked for by its number."""
    tables = [make_tables([[Op(makes=["x"])]], [Storage("x", size * MIB)]) for size in (4, 40, 12)]
    ranks = [(Manifest(target="train.py", rank=rank, world_size=3), one) for rank, one in enumerate(tables)]
    path = tmp_path / "ranks.memprof"
    write_trace(path, ranks)
    assert as_json(capsys, path, "--allocator")["rank"] == 1
    assert as_json(capsys, path, "--allocator", "--rank", 2)["reserved_peak_bytes"] == 12 * MIB
    assert "rank 1 of 3, the one with the highest peak" in report(capsys, [path, "--static"])


def test_planning_ahead_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Sum, pool, plans and bound stand in the order they must."""
    found = as_json(capsys, SAMPLE, "--static")
    assert found["needed_bound_bytes"] <= found["greedy_by_size_bytes"] < found["reserved_bytes"] < found["total_bytes"]
    assert found["needed_bound_bytes"] <= found["alive_bound_bytes"]
    assert found["in_place_bound_bytes"] <= found["needed_bound_bytes"]
    assert {one["operator"] for one in found["in_place"]} >= {"mul", "add"}
    out = report(capsys, [SAMPLE, "--static", "--top", "2"])
    assert "more operators; --top shows more" in out


def test_a_snapshot_without_a_history_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a history, the segments are summed; nothing is guessed, and there is no step to plan."""
    tables = make_tables([[Op()]], [Storage("x", 3 * MIB)])
    segments = Segments.of(
        device=["cuda:0", "cuda:0"],
        address=[0, 32 * MIB],
        total_size_bytes=[20 * MIB, 12 * MIB],
        allocated_size_bytes=[3 * MIB, 0],
        active_size_bytes=[4 * MIB, 0],
        requested_size_bytes=[4 * MIB - 512, 0],
        segment_type=["large", "large"],
    )
    path = write(tmp_path / "end.memprof", {**tables, Segments: segments})
    out = report(capsys, [path, "--allocator"])
    assert out.startswith("32.00 MiB are reserved; 28.00 MiB of it (87.5 %) is unused.")
    assert "no history" in out
    found = as_json(capsys, path, "--allocator")
    assert (found["holes_bytes"], found["idle_segments_bytes"], found["pending_bytes"]) == (16 * MIB, 12 * MIB, MIB)
    assert "no step to plan" in report(capsys, [path, "--static"], status=3)


@pytest.mark.parametrize("words", [["--by", "module"], ["--at", "3"], ["--html", "page.html"]])
def test_options_that_do_not_go_together_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each of the two has a page of its own."""
    assert "has a page of its own" in report(capsys, [SAMPLE, "--allocator", *words], status=2)
