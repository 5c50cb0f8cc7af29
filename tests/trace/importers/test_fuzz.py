"""Any change to a file gives a valid trace or an error message: never a crash, never a hang."""

from __future__ import annotations

import json
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memprof.errors import BadInputError, MemprofError
from memprof.trace.importers.importing import import_file
from memprof.trace.schema import Steps
from memprof.trace.store import Trace, write_trace
from tests.trace.importers.test_kineto import job
from tests.trace.importers.writing import MIB, block, entry, segment, small_job, snapshot

PICKLES = [pickle.dumps(small_job(), protocol) for protocol in (2, 3, 4, 5)]
TRACE = json.dumps({"traceEvents": job()}).encode()

changes = st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), min_size=1, max_size=6)


def opens_or_says_why(data: bytes) -> None:
    """Imports bytes; what comes in is written, opened and checked.

    That takes less than 5 s of the processor, which other work of the machine does not count in.
    """
    began = time.process_time()
    _opens_or_says_why(data)
    assert time.process_time() - began < 5


def _opens_or_says_why(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(data)
        try:
            ranks = import_file(file).ranks
        except MemprofError:
            return
        write_trace(Path(folder) / "run.memprof", ranks)
        trace = Trace.open(Path(folder) / "run.memprof")
        for rank in trace.ranks:
            one = trace.rank_trace(rank)
            for number in one.table(Steps).step.tolist():
                one.step(number).check()


quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(st.sampled_from(PICKLES), changes)
@quick
def test_changed_bytes_of_a_snapshot(data: bytes, changed: list[tuple[int, int]]) -> None:
    """Bytes of a pickle changed anywhere."""
    mutable = bytearray(data)
    for place, value in changed:
        mutable[place % len(mutable)] = value
    opens_or_says_why(bytes(mutable))


entries = st.builds(
    entry,
    st.sampled_from(
        ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "oom", "snapshot"]
    ),
    st.integers(0, 8).map(lambda place: place * 512),
    st.integers(0, 4096),
    stream=st.integers(0, 2),
    time_us=st.none() | st.integers(0, 100),
)
states = st.sampled_from(["active_allocated", "active_pending_free", "inactive"])
segments = st.builds(
    lambda sizes, state, device: segment(0, *(block(size, state) for size in sizes), device=device),
    st.lists(st.integers(0, 8 * MIB), max_size=4),
    states,
    st.integers(0, 2),
)


@given(st.lists(segments, max_size=3), st.lists(st.lists(entries, max_size=12), max_size=3))
@quick
def test_histories_that_make_no_sense(some: list[Any], histories: list[list[Any]]) -> None:
    """Frees of nothing, allocations over each other, segments that do not add up."""
    opens_or_says_why(pickle.dumps(snapshot(some, *histories), 4))


@given(changes)
@quick
def test_changed_bytes_of_a_profilers_trace(changed: list[tuple[int, int]]) -> None:
    """Bytes of JSON changed anywhere."""
    mutable = bytearray(TRACE)
    for place, value in changed:
        mutable[place % len(mutable)] = value
    opens_or_says_why(bytes(mutable))


def test_two_kinds_of_devices_with_one_number_are_refused() -> None:
    """Both would be one rank."""
    events: Any = job()
    next(event for event in events if event.get("name") == "[memory]")["args"]["Device Type"] = -1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(json.dumps(events).encode())
        with pytest.raises(BadInputError, match="several kinds of devices with one number"):
            import_file(file)
