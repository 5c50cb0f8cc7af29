"""Third-party files: the importer finds exactly the facts listed for each."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import Any

import pytest

from memprof.trace.importers.importing import Imported, import_file
from memprof.trace.importers.snapshot import read_snapshot
from memprof.trace.schema import AllocatorEvents, Memory, Segments, Steps, Storages
from memprof.trace.store import Trace
from tests.trace.importers.writing import DATA

FACTS: list[dict[str, Any]] = json.loads((DATA / "FACTS.json").read_text()) if (DATA / "FACTS.json").is_file() else []
SNAPSHOTS = [fact for fact in FACTS if "peaks" in fact]
TRACES = [fact for fact in FACTS if "peaks" not in fact]
#: Files of no memory events at all.
WITHOUT_MEMORY = "5c04d97c"

#: The generations of snapshots as the facts name them, by what the reader makes of them.
GENERATIONS = {
    "2.0": "A",
    "2.1 or 2.2": "B",
    "2.3": "C",
    "2.4": "D",
    "2.5 or 2.6": "E",
    "2.5 or later": "E+ (no trace: E,F or G)",
    "2.8 or 2.9": "F",
    "2.10 or 2.11": "G",
}

pytestmark = pytest.mark.skipif(not FACTS, reason=f"the real files are not here: there is no {DATA / 'FACTS.json'}")


def named(facts: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(fact, id=fact["file"].partition("/")[2][:40]) for fact in facts]


@cache
def imported(file: str) -> Imported:
    return import_file(DATA / file)


@pytest.mark.parametrize("fact", named(SNAPSHOTS))
def test_figures_are_those_of_the_facts(fact: dict[str, Any]) -> None:
    """Segments, blocks, entries by action, end state, start, peaks and completeness are exactly as told."""
    data = (DATA / fact["file"]).read_bytes()
    assert hashlib.sha256(data).hexdigest() == fact["sha256"]
    devices = [device.facts for device in read_snapshot(DATA / fact["file"]).devices]
    found = [
        {
            "device": int(one.device.removeprefix("cuda:")),
            "trace_entries": one.entries,
            "end_requested": one.end_requested_bytes,
            "end_allocated_blocks": one.end_allocated_bytes,
            "end_reserved": one.end_reserved_bytes,
            "start_requested": one.start_requested_bytes,
            "start_reserved": one.start_reserved_bytes,
            "peak_requested_in_window": one.peak_requested_bytes,
            "peak_reserved_in_window": one.peak_reserved_bytes,
            "history_complete": one.history_complete,
        }
        for one in devices
    ]
    assert found == fact["peaks"]
    totals = {
        "n_segments": sum(one.segments for one in devices),
        "n_blocks": sum(one.blocks for one in devices),
        "n_expandable": sum(one.expandable_segments for one in devices),
        "trace_len": [one.entries for one in devices],
        "actions": [one.actions for one in devices],
        "reserved": sum(one.end_reserved_bytes for one in devices),
        "allocated": sum(one.end_allocated_bytes for one in devices),
        "active": sum(one.end_active_bytes for one in devices),
        "requested": sum(one.end_active_requested_bytes for one in devices),
        "oom_events": [event for one in devices for event in one.out_of_memory],
    }
    assert totals == {key: fact[key] for key in totals}
    assert GENERATIONS[imported(fact["file"]).ranks[0][0].torch_version] == fact["gen"]


@pytest.mark.parametrize("fact", named(SNAPSHOTS))
def test_the_tables_say_the_same(fact: dict[str, Any]) -> None:
    """The trace's own tables hold the same peaks, segments and events, and its steps contradict nothing."""
    result = imported(fact["file"])
    trace = Trace.of(result.ranks, "run.memprof")
    for number in trace.table(Steps).step.tolist():
        trace.step(number).check()
    peaks = fact["peaks"][0]
    memory, storages, events = trace.table(Memory), trace.table(Storages), trace.table(AllocatorEvents)
    assert memory.reserved_bytes.max() == peaks["peak_reserved_in_window"]
    assert storages.requested_bytes[storages.freed_op_id < 0].sum() == peaks["end_requested"]
    assert storages.allocated_bytes[storages.freed_op_id < 0].sum() == peaks["end_allocated_blocks"]
    assert trace.table(Segments).total_size_bytes.sum() == fact["reserved"]
    assert (events.index >= 0).sum() == sum(fact["trace_len"])
    # Rounded to blocks, the peak is as high as what was asked for, and no higher than what was reserved.
    assert peaks["peak_requested_in_window"] <= memory.allocated_bytes.max() <= peaks["peak_reserved_in_window"]


@pytest.mark.parametrize("fact", named([fact for fact in TRACES if WITHOUT_MEMORY not in fact["file"]]))
def test_profilers_traces_add_up(fact: dict[str, Any]) -> None:
    """Sorted by time, events sum to the allocator's own count; the steps contradict nothing."""
    result = imported(fact["file"])
    trace = Trace.of(result.ranks, "run.memprof")
    for number in trace.table(Steps).step.tolist():
        trace.step(number).check()
    assert not [note for note in trace.manifest.notes if "differs" in note]
    assert trace.table(Memory).allocated_bytes.max() == result.devices[0]["peak_requested_bytes"]


def test_a_profilers_trace_without_addresses_has_steps_and_phases() -> None:
    """The trace of 2021 has six steps of ResNet-50; its batch of 32 peaks in backward, as its own counts have it."""
    fact = next(fact for fact in TRACES if "234cf25d" in fact["file"])
    trace = Trace.of(imported(fact["file"]).ranks, "run.memprof")
    assert trace.recorded_steps == (5, 6, 7, 8, 9, 10)
    assert not len(trace.table(AllocatorEvents))
    assert not imported(fact["file"]).devices[0]["history_complete"]
    lines = set(trace.step(7).ops.phase.tolist())
    assert lines == {"forward", "backward", "other"}
