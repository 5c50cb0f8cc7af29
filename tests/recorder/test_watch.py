"""Storages followed by weak references."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memprof.recorder.memory.live_objects import StorageWatch, arrays_held
from memprof.recorder.profiler.native import NativeEvents
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace
from tests.recorder.conftest import Logged, RecordJob


@pytest.fixture
def watch(log: Logged) -> StorageWatch:
    watch = StorageWatch(log)
    watch.start()
    return watch


def changes(log: Logged) -> list[int]:
    """Returns the bytes of every event, negative for frees, marks left out."""
    return [row["size_bytes"] for row in log.rows("events") if row["size_bytes"]]


def test_a_storage_is_born_once_and_dies(log: Logged, watch: StorageWatch) -> None:
    """However often it is shown, and by whichever of its views; it dies with the last of them."""
    tensor = torch.zeros(10)
    address = tensor.data_ptr()
    watch.watch(tensor, 1000)
    watch.watch(tensor, 2000)
    watch.watch(tensor[3:], 3000)
    view = tensor.view(2, 5)
    del tensor
    assert changes(log) == [40]
    del view
    assert changes(log) == [40, -40]
    born, died = log.rows("events")
    assert (born["time_ns"], born["address"], born["total"]) == (1000, address, -1)
    assert died["address"] == address


def test_memory_saved_for_backward_is_alive(log: Logged, watch: StorageWatch) -> None:
    """A tensor that only autograd holds has not died."""
    weight = torch.ones(3, requires_grad=True)
    hidden = weight * 2
    watch.watch(hidden, 1)
    result = hidden.exp().sum() + hidden.square().sum()
    del hidden
    assert changes(log) == [12]
    result.backward()
    del result
    assert changes(log) == [12, -12]


def test_older_memory_is_remembered_without_a_birth(log: Logged, watch: StorageWatch) -> None:
    """It is written down elsewhere as alive; only its death is told."""
    tensor = torch.zeros(10)
    watch.remember(tensor)
    watch.watch(tensor, 1)
    assert changes(log) == []
    del tensor
    assert changes(log) == [-40]


def test_a_resized_storage_is_two(log: Logged, watch: StorageWatch) -> None:
    """Its old block goes, the new one comes, at the moment it is shown again."""
    tensor = torch.zeros(10)
    watch.watch(tensor, 1)
    tensor.untyped_storage().resize_(80)
    watch.watch(tensor, 5)
    del tensor
    assert changes(log) == [40, -40, 80, -80]
    assert [row["time_ns"] for row in log.rows("events")[:3]] == [1, 5, 5]


def test_foreign_memory_is_not_followed(log: Logged, watch: StorageWatch) -> None:
    """Nor are tensors without a storage."""
    watch.watch(torch.frombuffer(bytearray(8), dtype=torch.float32), 1)
    watch.watch(torch.eye(2).to_sparse(), 1)
    watch.remember(torch.zeros(0))
    assert changes(log) == []


def test_deaths_in_a_pause_are_not_told(log: Logged, watch: StorageWatch) -> None:
    """What is alive is written down anew after a pause; what lived through it is followed on."""
    gone, stays = torch.zeros(10), torch.zeros(20)
    watch.watch(gone, 1)
    watch.watch(stays, 1)
    watch.stop()
    del gone
    watch.start()
    del stays
    assert changes(log) == [40, 80, -80]


def test_the_end_of_what_was_heard_is_marked(log: Logged, watch: StorageWatch) -> None:
    """At every cut and at the stop; a watch that does not run marks nothing."""
    watch.cut()
    watch.stop()
    watch.stop()
    assert [(row["address"], row["size_bytes"]) for row in log.rows("events")] == [(0, 0)] * 2


def test_an_abandoned_watch_keeps_nothing(log: Logged, watch: StorageWatch) -> None:
    """No free is reported after it, and it keeps no storage alive."""
    tensor = torch.zeros(10)
    watch.watch(tensor, 1)
    watch.abandon()
    del tensor
    gc.collect()
    assert changes(log) == [40]


def accumulating_job() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(7, 6)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_a_torch_without_native_events_is_recorded(record_job: RecordJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace then comes from weak references, says what they cannot see, and holds the same storages at each end."""
    native = record_job(accumulating_job)
    monkeypatch.setattr(NativeEvents, "is_available", staticmethod(lambda: False))
    watched = record_job(accumulating_job)
    assert native.manifest.backend.name == "cpu-native"
    assert watched.manifest.backend.name == "cpu-dispatch"
    assert "temporaries inside kernels" in watched.manifest.backend.blind_spots
    ends = [held_by_the_model(trace) for trace in (native, watched)]
    assert ends[0] == ends[1]
    # 41 parameters: 30 + 5 + 5 + 1; as many gradients, twice as many moments, a count for each of 4, and 7 x 6 inputs.
    assert ends[0] == {"parameter": 164, "gradient": 164, "optimizer_state": 328 + 16}


def held_by_the_model(trace: Trace) -> dict[str, int]:
    """Returns what the model and its optimizer hold when step 1 ends, in bytes by category."""
    storages = trace.step(1).storages
    at_end = storages.take(storages.freed_op_id == -1)
    wanted = ("parameter", "gradient", "optimizer_state")
    return {category: int(at_end.allocated_bytes[at_end.category == category].sum()) for category in wanted}


@pytest.mark.parametrize("skip", [0, 1, 4])
def test_older_memory_is_counted_once(record_job: RecordJob, skip: int) -> None:
    """A recording that begins in the middle of a job counts existing memory once, whenever its window opens.

    A linear model of 20 x 20 and 20, with momentum: before the step, parameters, gradients and momentum (1680 bytes
    each) and the batch of 5 x 20 (400 bytes).
    """
    model = torch.nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(5, 20)

    def train() -> None:
        for _ in range(skip + 3):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    train()
    trace = record_job(train, skip=skip)
    storages = trace.step(skip).storages
    known = storages.take((storages.created_op_id == -1) & (storages.category != "unknown"))
    at_start = {c: int(known.allocated_bytes[known.category == c].sum()) for c in set(known.category)}
    assert at_start == {"parameter": 1680, "gradient": 1680, "optimizer_state": 1680, "input": 400}
    gradients = known.take(known.category == "gradient")
    assert (gradients.freed_op_id != -1).all()  # zero_grad gives them back


def test_a_second_recording_counts_memory_of_the_first_once(record_job: RecordJob) -> None:
    """Blocks of the first recording are in the allocator's table still when they are freed in the second."""
    model = torch.nn.Linear(20, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 20)).sum().backward()
            optimizer.step()

    first, second = record_job(train), record_job(train)
    peaks = [int(live_bytes(trace.step(1)).during.max()) for trace in (first, second)]
    bases = [trace.step(1).bytes_at_start() for trace in (first, second)]
    assert bases[0] == bases[1]
    assert peaks[0] == peaks[1]


class Rows(np.ndarray[Any, Any]):
    """A subclass of numpy's arrays."""


def test_arrays_held_are_those_that_hold_memory(tmp_path: Path) -> None:
    """Views count as the array that they show, once; mapped files, tensors' memory and subclasses are left out."""
    arrays_held()  # objects that are younger than the first search are looked at
    (tmp_path / "rows.bin").write_bytes(bytes(4096))
    mapped = np.memmap(tmp_path / "rows.bin", dtype=np.uint8, mode="r")
    made = [np.ones(3), np.ones(4), np.array([object()], dtype=object), np.ones(5), np.ones(6), np.ones(7)]

    class Metric:
        first, predictions, last = 0, (), 0

    held = [
        [mapped, np.asarray(mapped), torch.ones(2).numpy(), np.ones(2).view(Rows), np.frombuffer(b"12", "u1")],
        [made[0], None, made[0][1:]],
        {"epoch": 1, "outputs": made[1]},
        deque([made[2]]),
        deque([1, 2]),
        {"untracked": {1: made[5]}},
        ("label", made[3]),
        (metric := Metric()),
    ]
    metric.first, metric.predictions, metric.last = 1, made[4], 2
    before = {id(array) for array in made}
    found = {id(array) for array in arrays_held()}
    assert before <= found
    assert not found & {id(array) for array in held[0]}
    counts = [sys.getrefcount(array) for array in made]
    arrays_held()
    assert [sys.getrefcount(array) for array in made] == counts


def test_search_for_arrays_keeps_no_container() -> None:
    """What the search has seen is freed with its last reference, without a collection of cycles."""
    tensor = torch.ones(2)
    is_alive = weakref.ref(tensor)
    holder = [[tensor], {"tensor": tensor}]
    gc.disable()
    try:
        arrays_held()
        del tensor, holder
        assert is_alive() is None
    finally:
        gc.enable()


def test_containers_that_another_thread_changes() -> None:
    """Containers that other threads fill and empty meanwhile raise nothing, in the search or in the thread."""
    kept: deque[Any] = deque()
    named: dict[int, Any] = {}
    is_over = threading.Event()
    faults: list[Exception] = []

    def change() -> None:
        try:
            while not is_over.is_set():
                kept.append(np.ones(2))
                named[len(named)] = np.ones(2)
                if len(kept) > 50:
                    kept.clear()
                    named.clear()
        except Exception as fault:  # noqa: BLE001 - for the assertion
            faults.append(fault)

    thread = threading.Thread(target=change)
    thread.start()
    for _ in range(5):
        arrays_held()
    is_over.set()
    thread.join()
    assert faults == []
