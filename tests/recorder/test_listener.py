"""The library in C++ that takes the place of torch's profiler: how it is built, and where it listens."""

from __future__ import annotations

import _thread
import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _autograd, _profiler

import memprof
from memprof.recorder.light import allocators
from memprof.recorder.light.events import Budget
from memprof.recorder.profiler import listener
from memprof.recorder.profiler.listener import Listener, build, library_path, why_none
from memprof.recorder.profiler.native import AllocatorTable, NativeEvents
from memprof.recorder.profiler.profiler_guard import ProfilerGuard
from memprof.recorder.profiler.sessions import ProfilerSession
from memprof.recorder.profiler.torch_library import core_flag, log_level
from memprof.trace.schema import AllocatorEvents, StepPeaks
from memprof.trace.store import Trace
from tests.recorder.conftest import Logged

Sizes = Callable[[], list[int]]


@pytest.fixture
def events(log: Logged, with_listener: Listener) -> NativeEvents:
    return NativeEvents(log)


@pytest.fixture
def sizes(log: Logged) -> Sizes:
    """Returns the bytes of each event logged so far."""
    return lambda: [row["size_bytes"] for row in log.rows("events") if row["size_bytes"]]


class _Nested(torch.autograd.Function):
    """Runs a backward inside backward; below a depth of 60, torch runs it in threads of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, innermost: Callable[[], None] | None = None) -> torch.Tensor:
        ctx.depth, ctx.innermost = depth, innermost
        return x * 2

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        if ctx.depth:
            with torch.enable_grad():
                x = torch.ones(1000 + ctx.depth, requires_grad=True)
                _Nested.apply(x, ctx.depth - 1, ctx.innermost).sum().backward()  # type: ignore[no-untyped-call]
        elif ctx.innermost is not None:
            ctx.innermost()
        return given[0], None, None


def test_every_thread_of_backward_is_heard(events: NativeEvents, sizes: Sizes) -> None:
    """Seventy backwards, each inside the last: each makes a tensor of its own size, ten of them in other threads."""
    assert events.start()
    x = torch.ones(10, requires_grad=True)
    _Nested.apply(x, 70).sum().backward()  # type: ignore[no-untyped-call]
    events.stop()
    assert {4 * (1000 + depth) for depth in range(1, 71)} <= set(sizes())


def test_a_session_of_the_jobs_ends_it_and_is_whole(events: NativeEvents, sizes: Sizes) -> None:
    """The job's begins as without memprof, also after one that backward has put back; until then torch reports none."""
    guard = ProfilerGuard()
    guard.install()
    try:
        assert events.start()
        assert not _autograd._profiler_enabled()
        x = torch.ones(10, requires_grad=True)
        x.register_hook(lambda _: events.stop())
        x.sum().backward()
        assert not events.is_running
        assert events.start()
        with torch.profiler.profile(profile_memory=True) as profile:
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
            assert not events.start()
        assert "aten::mm" in {event.key for event in profile.key_averages()}
        events.stop()
        heard = len(sizes())
        assert events.start()
        torch.ones(7)
        events.stop()
        assert sizes()[heard:] == [28, -28]
    finally:
        guard.remove()


def test_the_job_may_profile_in_a_thread_of_backward(events: NativeEvents, sizes: Sizes) -> None:
    """The listener is removed there, while it is on: what it has heard is incomplete by then, and not logged."""

    def profile() -> None:
        with torch.profiler.profile() as profiler:
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        found.extend((threading.get_ident(), *(event.key for event in profiler.key_averages())))

    found: list[Any] = []
    guard = ProfilerGuard()
    guard.install()
    try:
        assert events.start()
        x = torch.ones(10, requires_grad=True)
        _Nested.apply(x, 70, profile).sum().backward()  # type: ignore[no-untyped-call]
        events.stop()
        assert found[0] != threading.get_ident()
        assert "aten::mm" in found
        assert sizes() == []
        assert events.start()
        torch.ones(7)
        events.stop()
        assert sizes() == [28, -28]
    finally:
        guard.remove()


def test_a_session_of_nodes_is_not_ended_in_a_thread_of_backward() -> None:
    """Torch would end it there although other threads are inside its nodes; the job may profile afterwards."""

    def profile() -> None:
        with pytest.raises(RuntimeError, match="already enabled"), torch.profiler.profile():
            pass
        tried.append(threading.get_ident())

    tried: list[int] = []
    guard, session = ProfilerGuard(), ProfilerSession()
    guard.install()
    try:
        assert session.start(_profiler.RecordScope.BACKWARD_FUNCTION, profile_memory=True)
        x = torch.ones(10, requires_grad=True)
        _Nested.apply(x, 70, profile).sum().backward()  # type: ignore[no-untyped-call]
        assert session.stop() is not None
        assert tried[0] != threading.get_ident()
        with torch.profiler.profile() as profiler:
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        assert "aten::mm" in {event.key for event in profiler.key_averages()}
    finally:
        guard.remove()


def test_a_recorder_that_failed_leaves_nothing_in_the_way_of_the_jobs_session(events: NativeEvents) -> None:
    """The guard stays as long as a listener does, and goes with the next one."""
    before = _autograd._prepare_profiler
    for _ in range(2):
        guard = ProfilerGuard()
        guard.install()
        assert events.start()
        guard.remove()
        with torch.profiler.profile() as profile:
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        assert "aten::mm" in {event.key for event in profile.key_averages()}
        assert not events.is_running
    guard.remove()
    assert _autograd._prepare_profiler is before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_is_not_heard_and_may_listen_itself(events: NativeEvents, sizes: Sizes) -> None:
    """What the child takes is not in the parent's events; the child's own start anew."""
    assert events.start()
    child = os.fork()
    if not child:
        torch.empty(100)
        events.abandon()
        is_right = events.start()
        torch.empty(7)
        events.stop()
        os._exit(0 if is_right and sizes() == [28, -28] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    torch.empty(9)
    events.stop()
    assert sizes() == [36, -36]


def test_other_profilers_keep_their_slot(with_listener: Listener) -> None:
    """Where one of torch's runs, the listener does not start, and it is not in the way of the next one."""
    with torch.autograd.profiler.profile():
        assert not with_listener.start()
    assert with_listener.start()
    assert with_listener.stop() is not None
    assert with_listener.clear()
    with torch.autograd.profiler.profile() as profile:
        torch.ones(3)
    assert "aten::ones" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize(
    ("compiler", "says"), [("", "no C++ compiler"), ("#!/bin/sh\necho 'x.h: error: no such file' >&2\nexit 1\n", "x.h")]
)
def test_what_cannot_be_built_is_said_and_leaves_nothing(
    compiler: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler, or with one that fails: why, in one line; recordings go on without."""
    cache, tools = tmp_path / "cache", tmp_path / "tools"
    tools.mkdir()
    if compiler:
        (tools / "c++").write_text(compiler)
        (tools / "c++").chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.delenv("CXX", raising=False)
    listener.find_listener.cache_clear()
    try:
        assert says in build()
        assert [path for path in cache.rglob("*") if path.is_file()] == []
        assert why_none().startswith("not built")
    finally:
        listener.find_listener.cache_clear()


@pytest.mark.parametrize("error", [PermissionError("no access"), RuntimeError("no home folder")])
def test_without_a_readable_home_there_is_none_and_this_is_said(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`memprof doctor` goes on."""

    def raise_it(*_: str) -> Path:
        raise error

    monkeypatch.setattr(listener, "user_folder", raise_it)
    listener.find_listener.cache_clear()
    try:
        assert str(error) in why_none()
        assert build() in (str(error), listener._NO_COMPILER, listener._ON_LINUX)
    finally:
        listener.find_listener.cache_clear()


def test_a_compiler_may_have_words_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in CXX="ccache g++"."""
    (tmp_path / "ccache").write_text("#!/bin/sh\n")
    (tmp_path / "ccache").chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "ccache 'g++' -m64")
    assert listener._compiler() == [str(tmp_path / "ccache"), "g++", "-m64"]


def test_the_trial_imports_nothing_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener_library: Path
) -> None:
    """A file of the user's may be named like a module of Python's; PYTHONOPTIMIZE strips no check."""
    (tmp_path / "array.py").write_text("raise SystemExit('error: shadowed')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    assert listener._run([sys.executable, "-P", "-c", listener._TRIAL, str(listener_library)]) == ""
    trial = listener._TRIAL.replace("kept.nbytes + 40", "3 * kept.nbytes")  # more than there is
    assert "does not report" in listener._run([sys.executable, "-P", "-c", trial, str(listener_library)])


def test_a_cache_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, with_listener: Listener) -> None:
    """The system's reason is returned."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert "/dev/null" in build()


def test_a_library_that_others_may_have_written_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_listener: Listener, listener_library: Path
) -> None:
    """Neither one that is writable for others, nor one in a folder that is; one that is broken is reported, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = library_path()
    path.parent.mkdir(parents=True, mode=0o700)
    shutil.copy(listener_library, path)
    found = {}
    for mode, folder_mode in ((0o700, 0o700), (0o722, 0o700), (0o700, 0o777)):
        path.chmod(mode)
        path.parent.chmod(folder_mode)
        listener.find_listener.cache_clear()
        found[mode, folder_mode] = why_none()
    path.parent.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "broken"))
    library_path().parent.mkdir(parents=True, mode=0o700)
    library_path().write_bytes(b"nothing")
    library_path().chmod(0o700)
    listener.find_listener.cache_clear()
    found[0, 0] = why_none()
    listener.find_listener.cache_clear()
    assert list(found.values()) == ["", *["built, but others may have written it"] * 2, "built, but cannot be loaded"]


def test_a_light_recording_has_the_highest_count_of_every_step(
    with_listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, temporaries inside kernels included, without a stretch of events; torch's own table rests."""
    monkeypatch.setattr(allocators, "find_listener", lambda: with_listener)
    monkeypatch.setattr(Budget, "may_listen", lambda _: False)
    table = AllocatorTable()
    table.switch_on(is_late=True)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(rows: int) -> None:
        (model(torch.ones(rows, 64)).sort(stable=True)[0].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    train(8)
    sizes = [8, 8, 64, 512, 8, 8]
    flag, is_kept = core_flag("FLAGS_caffe2_report_cpu_memory_usage", ctypes.c_bool), []
    with memprof.record(tmp_path / "run.memprof", light=True):
        table.switch_off()  # the recorder's own user is the only one now
        for rows in sizes:
            train(rows)
            is_kept.append(flag.value)
    assert not flag.value
    assert is_kept[0]
    assert threading.active_count() > 1 or is_kept[3:] == [False] * 3
    table.switch_on(is_late=True)
    highest = []
    for rows in sizes:
        assert with_listener.start()
        train(rows)
        heard = with_listener.stop()
        assert heard is not None
        assert with_listener.clear()
        highest.append(max(accumulate(heard.cpu[2::4])))
    table.switch_off()
    peaks = Trace.open(tmp_path / "run.memprof").table(StepPeaks)
    assert set(peaks.how[: len(sizes)]) == {"heard"}
    rises = peaks.allocated_bytes[1 : len(sizes)] - peaks.allocated_bytes[0]
    assert rises.tolist() == [high - highest[0] for high in highest[1:]]


def test_the_first_thread_that_starts_wakes_the_table_for_good(
    with_listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it runs: what it allocates and frees is counted. torch's warnings are then as they were, too."""
    monkeypatch.setattr(allocators, "find_listener", lambda: with_listener)
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # whatever other tests have left
    flag, level = core_flag("FLAGS_caffe2_report_cpu_memory_usage", ctypes.c_bool), log_level()
    starts, found_level = (threading._start_new_thread, _thread.start_new_thread), level.value  # type: ignore[attr-defined]
    table, count, seen = AllocatorTable(), allocators.AllocatorCount(), []
    table.switch_on(is_late=False)
    exact = allocators.ExactCount(count, table, is_allowed=True)
    try:
        assert count.find()
        assert exact.start(1)
        assert flag.value
        assert exact.start(2)
        assert exact.is_resting
        assert not flag.value or AllocatorTable._users > 1
        thread = threading.Thread(target=lambda: seen.append((flag.value, level.value)))
        thread.start()
        thread.join()
        assert seen == [(True, found_level)]
        assert exact.start(3)
        assert not exact.is_resting
        assert exact.is_sound
        assert starts == (threading._start_new_thread, _thread.start_new_thread)  # type: ignore[attr-defined]
    finally:
        exact.stop()
        table.switch_off()


_JOB = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.LazyLinear(5))
model(torch.ones(1, 3, 8, 8))
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 3, 8, 8)).sort(stable=True)[0].square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item(), torch.rand(1).item())
"""


def test_recordings_hold_the_same_events_either_way(listener_library: Path, tmp_path: Path) -> None:
    """Each event's bytes, the allocator's count after it and its operator; the job prints what it prints unrecorded."""
    (tmp_path / "job.py").write_text(_JOB)
    plain = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = []
    for cache in (tmp_path, listener_library.parents[2]):
        command = [sys.executable, "-m", "memprof", "record", "-q", "-f", "-o", "run.memprof", "--steps", "2", "job.py"]
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == plain.stdout
        events = Trace.open(tmp_path / "run.memprof").table(AllocatorEvents)
        found.append(list(zip(events.action.tolist(), events.size_bytes.tolist(), events.op_id.tolist(), strict=True)))
    assert found[0] == found[1]
    assert len(found[0]) > 100
