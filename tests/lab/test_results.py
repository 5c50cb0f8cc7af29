"""Results are written whole, read back, and judged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from lab.gpu.policies import LEAST, MODELS, PLANS
from lab.gpu.replayed import written_down
from lab.gpu.results import BROKEN, Bar, Results, Section, markdown_of, table_of
from memprof.replay.allocator.events import ALLOCATE, FREE, Requests, replay
from memprof.replay.allocator.rules import MIB, Settings
from tests.devices import compare_recording

MACHINE = {
    "device": "NVIDIA H100",
    "memory_bytes": 80 * 2**30,
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0+cu130",
    "python": "3.12.3",
}


def section(**more: object) -> Section:
    return Section("exact", title="Peaks", columns=["run", "bytes"], rows=[["a|b", "1,024"]], figures=[{}], **more)


def test_bars_decide() -> None:
    """A section passes when it ran to its end, lost no row and missed no bar; a bar that cannot be judged is none."""
    assert section(bars=[Bar("equal", True), Bar("fast", None)]).passed
    assert not section(bars=[Bar("equal", False)]).passed
    assert not section(errors=["a row was lost"]).passed
    assert not section(status=BROKEN).passed


def test_results_of_the_same_machine_are_kept(tmp_path: Path) -> None:
    """A second command adds its sections; one on another machine or torch begins anew."""
    results = Results.load(tmp_path, MACHINE)
    results.put(section(bars=[Bar("equal", True)]))
    results.write()
    assert Results.load(tmp_path, MACHINE).sections["exact"].bars == [Bar("equal", True)]
    assert not Results.load(tmp_path, {**MACHINE, "torch": "2.12.0"}).sections
    assert json.loads((tmp_path / "results.json").read_text())["passed"] == {"exact": True}


def test_pages_say_what_they_were_measured_on(tmp_path: Path) -> None:
    """The Markdown begins with device, torch and driver; the columns of a table are aligned and its bars are listed."""
    results = Results.load(tmp_path, MACHINE)
    results.put(section(bars=[Bar("equal to the byte", False)]))
    page = markdown_of(results)
    head = page.split("###")[0]
    assert all(text in head for text in ("NVIDIA H100 (80.0 GiB)", "torch 2.11.0+cu130", "CUDA 13.0", "driver 580.1"))
    assert "| a\\|b | 1,024 |" in page
    table = table_of(results.sections["exact"]).splitlines()
    assert table[1:3] == ["  run  bytes", "  a|b  1,024"]
    assert "Bar: equal to the byte: NOT passed." in table[3]


def test_there_are_enough_plans() -> None:
    """The plans that are tried on a GPU are known, none twice, and more than the bar asks for."""
    assert all(name in PLANS for _, names in MODELS.values() for name in names)
    assert all(len(set(names)) == len(names) for _, names in MODELS.values())
    assert sum(len(names) for _, names in MODELS.values()) >= LEAST


def test_a_history_that_begins_in_the_middle_is_compared() -> None:
    """Events of which the first are missing fit the model, with blocks larger than what was asked for among them."""
    random = np.random.default_rng(0)
    size = np.where(random.random(300) < 0.5, random.integers(1, MIB, 300), random.integers(MIB, 30 * MIB, 300))
    kind, allocation = [], []
    for number in range(300):
        kind.append(ALLOCATE)
        allocation.append(number)
        if number >= 20:
            kind.append(FREE)
            allocation.append(number - 20)
    done = replay(Requests.of(np.array(kind), np.array(allocation), size))
    for begin in (0.0, 0.3, 0.7):
        events, segments = written_down(done, begin)
        compared, differ = compare_recording(events, segments, Settings(), int(segments.allocated_size_bytes.sum()))
        assert differ == 0, compared.mismatches[:3]
        assert compared.allocations > 50


def test_a_history_that_is_wrong_is_noticed() -> None:
    """An allocation recorded at another address, or an unrecorded block, differs from the model."""
    done = replay(Requests.of(np.array([ALLOCATE] * 4 + [FREE]), np.array([0, 1, 2, 3, 1]), np.full(4, 3 * MIB)))
    events, segments = written_down(done)
    moved = events.replace(address=events.address + np.where(events.action == "alloc", 512, 0))
    alive_bytes = int(segments.allocated_size_bytes.sum())
    assert compare_recording(moved, segments, Settings(), alive_bytes)[1] > 0
    assert compare_recording(events, segments, Settings(), alive_bytes)[1] == 0
    assert compare_recording(events, segments, Settings(), alive_bytes + 512)[1] == 1
