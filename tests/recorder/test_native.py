"""Allocation events from torch's own allocator."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._C import _autograd, _profiler

from memprof.recorder.profiler import native, sessions
from memprof.recorder.profiler.native import AllocatorTable, NativeEvents, allocations, device_sizes_of
from memprof.recorder.profiler.sessions import ProfilerSession
from tests.recorder.conftest import Logged

_LIBRARY = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
_REPORTS = ctypes.c_bool.in_dll(_LIBRARY, "FLAGS_caffe2_report_cpu_memory_usage")
_LOG_LEVEL = ctypes.c_int.in_dll(_LIBRARY, "FLAGS_caffe2_log_level")


@pytest.fixture
def table() -> Iterator[AllocatorTable]:
    table = AllocatorTable()
    table.switch_on(is_late=True)
    yield table
    table.switch_off()


@pytest.fixture(params=["profiler", "listener"], autouse=True)
def source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs each test with torch's profiler, and with the listener."""
    if request.param == "listener":
        request.getfixturevalue("with_listener")
        return
    for module in (sessions, native):
        monkeypatch.setattr(module, "find_listener", lambda: None)


@pytest.fixture
def events(log: Logged, table: AllocatorTable) -> Iterator[NativeEvents]:
    events = NativeEvents(log)
    yield events
    events.abandon()


def changes(log: Logged) -> list[int]:
    return [row["size_bytes"] for row in log.rows("events") if row["size_bytes"]]


def test_takings_and_frees_are_heard(log: Logged, events: NativeEvents) -> None:
    """With address and size, and the allocator's count, which moves by that size."""
    assert events.start()
    tensor = torch.empty(1000)
    address = tensor.data_ptr()
    del tensor
    events.stop()
    taken, freed, mark = log.rows("events")
    assert (taken["address"], taken["size_bytes"]) == (freed["address"], -freed["size_bytes"]) == (address, 4000)
    assert taken["total"] - freed["total"] == 4000
    assert taken["time_ns"] <= freed["time_ns"] <= mark["time_ns"]
    assert (mark["address"], mark["size_bytes"], mark["total"]) == (0, 0, -1)


def test_temporaries_inside_kernels_are_heard(log: Logged, events: NativeEvents) -> None:
    """Sorting 1000 numbers returns 4000 + 8000 bytes, and takes more on the way, which comes and goes."""
    numbers = torch.rand(1000)
    events.start()
    result = torch.sort(numbers, stable=True)
    events.stop()
    assert sum(changes(log)) == 12_000
    assert sum(size for size in changes(log) if size > 0) > 12_000
    del result


def test_events_go_on_after_a_cut(log: Logged, events: NativeEvents) -> None:
    """Memory allocated before a cut and freed after it appears on both sides; a cut at rest does nothing."""
    events.cut()
    events.start()
    tensor = torch.empty(10)
    events.cut()
    assert changes(log) == [40]
    del tensor
    events.stop()
    assert changes(log) == [40, -40]


def test_reports_of_a_device_are_heard_without_their_addresses(log: Logged, events: NativeEvents) -> None:
    """torch's tree of events leaves out what CUDA's allocator reports: times and sizes come from its flat list."""
    report = _LIBRARY._ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE
    report.argtypes = (ctypes.c_void_p, ctypes.c_long, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_uint16)
    report.restype = None
    cuda_0, cuda_3 = 1, 1 | 3 << 8  # c10::Device: the type in the lower byte, the index in the upper one
    session = ProfilerSession()
    assert session.start(_profiler.RecordScope.LITE_INTERPRETER, profile_memory=True)
    kept = torch.empty(100)
    report(0x1000, 1 << 40, 1 << 40, 1 << 41, cuda_3)
    report(0x2000, 512, 512, 1024, cuda_0)
    report(0x2000, -512, 0, 1024, cuda_0)
    result = session.stop()
    found = device_sizes_of(result)
    assert [(device, size) for _, device, size in found] == [(3, 1 << 40), (0, 512), (0, -512)]
    assert [time_ns for time_ns, _, _ in found] == sorted(time_ns for time_ns, _, _ in found)
    assert allocations(result)[2::4].tolist() == [kept.nbytes]


def test_nothing_is_heard_outside(log: Logged, events: NativeEvents) -> None:
    """Neither before the start nor after the stop."""
    kept = torch.empty(10)
    events.start()
    events.stop()
    del kept
    torch.empty(10)
    assert changes(log) == []


def test_the_jobs_own_profiler_is_left_alone(log: Logged, events: NativeEvents) -> None:
    """While it runs, hearing does not start, and it loses nothing."""
    with torch.profiler.profile(profile_memory=True) as profile:
        assert not events.start()
        events.stop()
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert "aten::mm" in {event.key for event in profile.key_averages()}
    assert events.start()


def test_an_abandoned_session_is_over(log: Logged, events: NativeEvents) -> None:
    """In a forked child nothing is logged, and torch's profiler is free again."""
    events.start()
    torch.empty(10)
    events.abandon()
    assert not _autograd._profiler_enabled()
    assert log.rows("events") == []


def test_the_allocators_flags_are_put_back() -> None:
    """Both as they were found, once: a second switching off changes nothing that others have switched since."""
    table = AllocatorTable()
    assert table.is_available
    before = (_REPORTS.value, _LOG_LEVEL.value)
    table.switch_on(is_late=True)
    assert (_REPORTS.value, _LOG_LEVEL.value) == (True, max(before[1], 2))
    table.switch_off()
    assert (_REPORTS.value, _LOG_LEVEL.value) == before
    other = AllocatorTable()
    other.switch_on(is_late=False)
    table.switch_off()
    assert _REPORTS.value
    assert _LOG_LEVEL.value == before[1]
    other.switch_off()
    assert not _REPORTS.value


def test_freeing_older_memory_says_nothing(
    log: Logged, table: AllocatorTable, events: NativeEvents, capfd: pytest.CaptureFixture[str]
) -> None:
    """Torch warns on stderr of blocks it does not know; the job's stderr stays as it would be."""
    events.start()
    older = [torch.empty(100 + number) for number in range(10)]
    table.switch_off()
    unknown = [torch.empty(100 + number) for number in range(10)]
    table.switch_on(is_late=True)
    del older, unknown
    events.stop()
    assert capfd.readouterr().err == ""
