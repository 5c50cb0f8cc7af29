"""Records small jobs in this process, and compares what they return with the same job unrecorded."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

import memprof
from memprof.recorder.log import RawLog
from memprof.recorder.profiler import listener, native, sessions
from memprof.trace.files.spool import COLUMNS
from memprof.trace.files.spool_writer import SpoolWriter
from memprof.trace.store import Trace

#: A job makes everything it needs, trains, and returns what must not depend on being recorded.
Job = Callable[[], Any]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Keeps torch to one thread: sums are added in one order, and a fork finds no lock held."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def listener_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the listener in a cache folder of the tests' own; skips where that is not possible."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        fault = listener.build()
        if fault and "no C++ compiler" not in fault and "Linux only" not in fault:
            pytest.fail(fault)
        if fault:
            pytest.skip(fault)
        return listener.library_path()


@pytest.fixture
def with_listener(listener_library: Path, monkeypatch: pytest.MonkeyPatch) -> listener.Listener:
    """Has this process's sessions use it."""
    found = listener.Listener(listener_library)
    for module in (sessions, native):
        monkeypatch.setattr(module, "find_listener", lambda: found)
    return found


class RecordJob(Protocol):
    """Runs a job twice, unrecorded and recorded, and returns the trace."""

    def __call__(self, job: Job, *, steps: int = 1, skip: int = 1) -> Trace: ...


@pytest.fixture
def record_job(tmp_path: Path) -> RecordJob:
    """Records a job, having checked that it returns what it returns unrecorded and that every step is sound."""

    def record(job: Job, *, steps: int = 1, skip: int = 1) -> Trace:
        expected = job()
        gc.collect()  # optimizers of jobs before must not be waited for
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.memprof"
        with memprof.record(path, steps=steps, skip=skip):
            found = job()
        assert_same(found, expected)
        trace = Trace.open(path)
        for number in trace.recorded_steps:
            trace.step(number).check()
        return trace

    return record


def assert_same(found: Any, expected: Any) -> None:
    """Asserts equality to the last bit of tensors, numbers and whatever else nested lists, tuples and dicts hold."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


class Logged(RawLog):
    """A log whose rows and texts are read where they are written, without a file."""

    def __init__(self) -> None:
        self.written = Frames()
        super().__init__(self.written)

    def rows(self, stream: str) -> list[dict[str, int]]:
        """Returns the rows of a stream logged so far, by column."""
        self.flush()
        names = COLUMNS[stream]
        numbers = self.written.rows.get(stream, [])
        starts = range(0, len(numbers), len(names))
        return [dict(zip(names, numbers[start : start + len(names)], strict=True)) for start in starts]

    def texts(self, stream: str) -> list[Any]:
        """Returns the texts of a stream, in the order of their numbers."""
        self.flush()
        return [text for batch in self.written.records.get(stream, []) for text in batch]


class Frames(SpoolWriter):
    """Keeps frames in memory."""

    def __init__(self) -> None:
        self.rows: dict[str, list[int]] = {}
        self.records: dict[str, list[Any]] = {}

    def write_rows(self, stream: str, rows: array[int]) -> None:
        self.rows.setdefault(stream, []).extend(rows)

    def write_record(self, stream: str, record: Any) -> None:
        self.records.setdefault(stream, []).append(list(record) if isinstance(record, list) else record)

    def close(self) -> None:
        pass


@pytest.fixture
def log() -> Logged:
    """An empty log."""
    return Logged()
