"""Profilers' traces written by hand, in all four formats of memory events."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from memprof.errors import BadInputError, UsageError
from memprof.trace.importers.importing import import_file
from memprof.trace.schema import NONE, AllocatorEvents, Memory, Ops, Stacks, Steps, Storages
from memprof.trace.store import Trace

SCHEMAS = ("2021", "1.13", "2.x", "hip")


def memory(ts: float, size: int, address: int, total: int, schema: str = "2.x", device: int = 0) -> dict[str, Any]:
    """A memory event as one of the profilers writes it."""
    args: dict[str, Any] = {"Device Type": 6 if schema == "hip" else 1, "Device Id": device, "Bytes": size}
    if schema != "2021":
        args |= {"Addr": address, "Total Allocated": total, "Total Reserved": 4096}
    args |= {"Profiler Event Index": 1} if schema == "1.13" else {"Ev Idx": 1} if schema == "2.x" else {}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": ts, "args": args}


def ran(start: float, end: float, name: str, cat: str = "cpu_op", **more: Any) -> dict[str, Any]:
    """Something that ran."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": "1", "ts": start, "dur": end - start, **more}


def job(schema: str = "2.x") -> list[dict[str, Any]]:
    """Two steps, out of order in the file; 1536 bytes were in use before, of which 512 are freed in the trace."""
    return [
        memory(30, 1024, 0xB, 3072, schema),
        ran(0, 50, "ProfilerStep#4", "user_annotation"),
        ran(50, 99, "ProfilerStep#5", "user_annotation"),
        memory(10, 1024, 0xA, 2560, schema),
        memory(20, -512, 0x9, 2048, schema),
        ran(5, 12, "nn.Module: Linear_0", "python_function"),
        ran(6, 11, "model.py(12): forward", "python_function"),
        ran(8, 11, "aten::linear"),
        ran(9, 11, "aten::empty"),
        ran(25, 35, "autograd::engine::evaluate_function: AddmmBackward0"),
        ran(26, 35, "aten::mm"),
        memory(40, -1024, 0xA, 2048, schema),
        ran(55, 70, "Optimizer.step#SGD.step", "user_annotation"),
        memory(60, 512, 0xC, 2560, schema),
        memory(61, 0, 0xD, 2560, schema),
    ]


def opened(tmp_path: Path, content: Any, **choices: Any) -> Trace:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(content))
    result = import_file(file, **choices)
    trace = Trace.of(result.ranks, file)
    for number in trace.table(Steps).step.tolist():
        trace.step(number).check()
    return trace


@pytest.mark.parametrize("schema", SCHEMAS)
def test_all_four_ways_to_write_memory_events_are_read(schema: str, tmp_path: Path) -> None:
    """Sorted by time, with what was in use before as far as it is known, whether top level is a dict or a list."""
    for content in ({"traceEvents": job(schema)}, job(schema)):
        trace = opened(tmp_path, content)
        counters = trace.table(Memory)
        start = 512 if schema == "2021" else 1536
        assert (counters.allocated_bytes - start).tolist() == [0, 1024, 1536, 1024]
        assert set(counters.reserved_bytes) == ({NONE} if schema == "2021" else {4096})
        assert set(trace.table(Storages).device) == {"cuda:0"}


def test_operators_phases_and_lines_come_from_what_ran_around(tmp_path: Path) -> None:
    """The outermost operator of torch names a row; modules, autograd and optimizers give its phase."""
    trace = opened(tmp_path, job())
    ops = trace.table(Ops)
    assert ops.name.tolist()[1:] == ["aten.linear", "aten.mm", "Optimizer.step#SGD.step"]
    assert ops.phase.tolist()[1:] == ["forward", "backward", "optimizer"]
    assert trace.table(Stacks).frames[ops.stack_id[1]] == "model.py:12:forward"
    assert trace.table(Storages).category.tolist().count("activation") == 2


def test_steps_keep_the_profilers_numbers(tmp_path: Path) -> None:
    """ProfilerStep#4 is step 4."""
    trace = opened(tmp_path, job())
    assert trace.table(Steps).step.tolist() == [4, 5]
    assert trace.table(Ops).step.tolist() == [4, 4, 4, 5]


def test_without_addresses_frees_pair_by_size(tmp_path: Path) -> None:
    """The trace of 2021 has no addresses, so none are invented in the allocator's events; a note says so."""
    trace = opened(tmp_path, job("2021"))
    storages = trace.table(Storages)
    assert storages.created_op_id.tolist() == [NONE, 1, 2, 3]
    assert storages.freed_op_id.tolist() == [1, NONE, 2, NONE]
    assert not len(trace.table(AllocatorEvents))
    assert any("no addresses" in note for note in trace.manifest.notes)


def test_the_cpu_counts_only_where_there_is_no_other_device(tmp_path: Path) -> None:
    """A job's tensors on the CPU are not what runs out on a device."""
    on_cpu = memory(1, 64, 0x1, 64)
    on_cpu["args"] |= {"Device Type": 0, "Device Id": -1}
    assert set(opened(tmp_path, [*job(), on_cpu]).table(Storages).device) == {"cuda:0"}
    alone = opened(tmp_path, [on_cpu, {**on_cpu, "ts": 2}])
    assert set(alone.table(Storages).device) == {"cpu"}
    assert alone.table(Storages).allocated_bytes.tolist() == [64, 64]


def test_devices_become_ranks(tmp_path: Path) -> None:
    """Each device of a trace is a rank; one may be chosen."""
    events = [*job(), memory(5, 512, 0x77, 512, device=3), memory(6, 512, 0x78, 1024, device=3)]
    assert opened(tmp_path, events).ranks == (0, 3)
    assert opened(tmp_path, events, device=3, rank=1).ranks == (1,)
    with pytest.raises(UsageError, match="nothing of device 2"):
        opened(tmp_path, events, device=2)


@pytest.mark.parametrize("counted", [0, 3072])
def test_the_start_of_a_trace_of_the_cpu_is_unknown(counted: int, tmp_path: Path) -> None:
    """Torch's CPU allocator counts while a profiler runs only, and goes on counting what is freed between two of them.

    So neither a count of 0 at the first event nor one of 3 KiB says what was in use: the peak is that of the events.
    """
    events = [memory(10, 1024, 0xA, counted + 1024), memory(20, -1024, 0xA, counted)]
    for event in events:
        event["args"] |= {"Device Type": 0, "Device Id": -1, "Total Reserved": 0}
    (tmp_path / "trace.json").write_text(json.dumps(events))
    (device,) = import_file(tmp_path / "trace.json").devices
    assert device["peak_allocated_bytes"] == 1024
    assert not device["history_complete"]
    assert device["start_allocated_bytes"] is device["peak_reserved_bytes"] is None
    assert "lower bound" in opened(tmp_path, events).manifest.capture.reason


def test_shared_memory_and_mapped_files_are_like_other_memory_of_the_cpu(tmp_path: Path) -> None:
    """Torch writes 0 as what is allocated, and the size as what is reserved, with each: neither is a count."""
    events = [memory(1, 512, 0xA, 512), memory(2, 1024, 0xB, 0), memory(3, -512, 0xA, 0), memory(4, -1024, 0xB, 0)]
    for event, reserved in zip(events, (0, 1024, 0, 0), strict=True):
        event["args"] |= {"Device Type": 0, "Device Id": -1, "Total Reserved": reserved}
    trace = opened(tmp_path, events)
    assert set(trace.table(Memory).reserved_bytes) == {NONE}
    assert max(trace.table(Memory).allocated_bytes) == 1536
    assert "own count" not in " ".join(trace.manifest.notes)


def test_counts_that_drift_are_told(tmp_path: Path) -> None:
    """Where the allocator's own count is not the sum of events, a note says how often."""
    events = [memory(1, 512, 1, 512), memory(2, 512, 2, 4096)]
    assert "at 1 events the allocator's own count differs" in " ".join(opened(tmp_path, events).manifest.notes)


BROKEN: dict[str, tuple[bytes, str]] = {
    "cut short": (b'{"traceEvents": [{"name": "[mem', "not JSON, or is cut short"),
    "deep": (b"[" * 100_000, "not JSON, or is cut short"),
    "no events": (b'{"a": 1}', "no traceEvents"),
    "no memory": (b'{"traceEvents": [{"name": "x"}]}', "profile_memory=True"),
    "bytes that are a text": (b'[{"name": "[memory]", "ts": 1, "args": {"Bytes": "x"}}]', "no integer byte count"),
    "no args": (b'[{"name": "[memory]", "ts": 1}]', "no time or no args"),
    "an endless time": (b'[{"name": "[memory]", "ts": 1e999, "args": {"Bytes": 1}}]', "no time or no args"),
    "bytes beyond measure": (b'[{"name": "[memory]", "ts": 1, "args": {"Bytes": 1' + b"0" * 5000 + b"}}]", "not JSON"),
    "many bytes": (b'[{"name": "[memory]", "ts": 1, "args": {"Bytes": 1' + b"0" * 30 + b"}}]", "no integer byte count"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    """JSON that is not a trace, or has no memory events, is refused with the reason."""
    data, words = BROKEN[name]
    file = tmp_path / "trace.json.gz"
    file.write_bytes(gzip.compress(data))
    with pytest.raises(BadInputError, match=words):
        import_file(file)
