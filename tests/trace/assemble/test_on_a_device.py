"""Recordings of a device are assembled as exactly as those of the processor."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from memprof.analysis.report.report import build_report
from memprof.recorder.recorder import Recorder
from memprof.recorder.steps.window import Window
from memprof.replay.allocator.rules import Settings
from memprof.replay.live import live_bytes
from memprof.trace.assemble import assemble_devices
from memprof.trace.assemble.memory.native_events import read_device_events
from memprof.trace.assemble.steps import choose_epoch
from memprof.trace.files.spool import read_spool
from memprof.trace.files.trim import drop_warm_up
from memprof.trace.schema import ACTIONS, ELSEWHERE, NONE, AllocatorEvents, Memory, Ops, Segments, Steps, Storages
from memprof.trace.store import Trace
from tests.devices import compare_recording
from tests.trace.assemble.device_twin import DEVICE, Twin


def train(model: torch.nn.Module, batch: Callable[[], torch.Tensor], optimizer: type[torch.optim.Optimizer]) -> None:
    """Trains six steps."""
    updates = optimizer(model.parameters(), lr=1e-3)
    for _ in range(6):
        updates.zero_grad()
        model(batch()).square().mean().backward()
        updates.step()


def transformer() -> None:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    train(torch.nn.TransformerEncoder(layer, 3), lambda: torch.randn(8, 40, 64), torch.optim.AdamW)


def convolutions() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 24, 3, padding=1),
        torch.nn.BatchNorm2d(24),
        torch.nn.ReLU(inplace=True),
        torch.nn.Conv2d(24, 24, 3, stride=2, groups=24),
        torch.nn.Flatten(),
        torch.nn.Linear(24 * 15 * 15, 10),
    )
    train(model, lambda: torch.randn(16, 3, 32, 32), torch.optim.SGD)


def recurrent() -> None:
    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = torch.nn.LSTM(32, 96, num_layers=2, batch_first=True)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.lstm(batch)[0][:, -1]
            return output

    train(Last(), lambda: torch.randn(12, 25, 32), torch.optim.Adam)


pytestmark = pytest.mark.xdist_group("on a device")
JOBS = (transformer, convolutions, recurrent)


@pytest.fixture(scope="module", params=JOBS, ids=lambda job: job.__name__)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The raw recording of a job on the processor."""
    gc.collect()
    folder = tmp_path_factory.mktemp("recorded") / "process-1"
    recorder = Recorder(folder, Window(skip=1, steps=2))
    recorder.install()
    try:
        request.param()
    finally:
        recorder.finish("the job ended")
    assert not recorder.failure
    return folder


def opened(folder: Path) -> Trace:
    """Assembles a recording, and checks every step."""
    (rank,) = assemble_devices(folder, {}, None)
    trace = Trace.of([rank], "run.memprof")
    for number in trace.recorded_steps:
        trace.step(number).check()
    return trace


def windows(folder: Path) -> dict[int, tuple[int, int]]:
    """Returns begin and end of the recorded steps, in nanoseconds."""
    steps = read_spool(folder).records["steps"]
    return {step["step"]: (step["start_ns"], step["end_ns"]) for step in steps if step["kind"] == "recorded"}


def left(storages: Storages) -> int:
    """Returns the bytes that are in use at the end."""
    return int(storages.allocated_bytes[storages.freed_op_id == NONE].sum())


def peaks(trace: Trace, step: int) -> tuple[int, int, int]:
    """Returns the peaks of allocated, active and reserved bytes of a step."""
    memory = trace.step(step).memory
    return int(memory.allocated_bytes.max()), int(memory.active_bytes.max()), int(memory.reserved_bytes.max())


@pytest.mark.parametrize("settings", [Settings(), Settings(expandable_segments=True)], ids=["plain", "expandable"])
def test_peaks_are_those_the_allocator_counts(source: Path, tmp_path: Path, settings: Settings) -> None:
    """Allocated, active and reserved peaks of every recorded step, to the byte; and the replay's peak is the same."""
    twin = Twin(source, settings=settings)
    trace = opened(twin.write(tmp_path / "device"))
    for step, (begin, end) in windows(source).items():
        assert peaks(trace, step) == twin.statistics.peaks(begin, end)
        assert int(live_bytes(trace.step(step)).during.max()) == peaks(trace, step)[0]
    assert trace.manifest.backend.name == "cuda-native"
    assert set(trace.table(Memory).device) == {DEVICE}
    assert (trace.manifest.machine.device_kind, trace.manifest.machine.capacity_bytes) == ("cuda", 2**34)


def test_blocks_that_await_another_stream_are_active(source: Path, tmp_path: Path) -> None:
    """They are not allocated any more, and counted as active until the other stream is done."""
    twin = Twin(source, delay=3)
    trace = opened(twin.write(tmp_path / "device"))
    for step, (begin, end) in windows(source).items():
        allocated, active, reserved = twin.statistics.peaks(begin, end)
        assert peaks(trace, step) == (allocated, active, reserved)
    counted = zip(twin.statistics.active, twin.statistics.allocated, strict=True)
    assert any(active > allocated for active, allocated in counted)


def test_the_allocators_events_replay_exactly(source: Path, tmp_path: Path) -> None:
    """Segments, addresses and final blocks come out of the model as they went in."""
    for delay in (0, 3):
        trace = opened(Twin(source, delay=delay).write(tmp_path / f"device-{delay}"))
        events = trace.table(AllocatorEvents)
        compared, differ = compare_recording(events, trace.table(Segments), Settings(), left(trace.table(Storages)))
        assert compared.allocations > 100
        assert differ == 0
        (rank,) = assemble_devices(tmp_path / f"device-{delay}", {}, None)
        later = drop_warm_up(rank[1])
        assert len(later[Ops]) < len(trace.table(Ops))
        compared, differ = compare_recording(later[AllocatorEvents], later[Segments], Settings(), left(later[Storages]))
        assert compared.allocations > 50
        assert differ == 0
        ops = trace.table(Ops)
        told = events.op_id[events.index != NONE]
        assert told.max() < len(ops)
        assert (np.diff(told[told != NONE]) >= 0).all()


def test_storages_are_those_of_the_processor(source: Path, tmp_path: Path) -> None:
    """What each is for, who made it and what was asked for are the same; the block is what the allocator rounds to."""
    on_cpu, on_device = opened(source), opened(Twin(source).write(tmp_path / "device"))

    def told(trace: Trace) -> Counter[tuple[str, str, int, str]]:
        storages, ops = trace.table(Storages), trace.table(Ops)
        # What the tests before left in this process, the recorder's job did not make.
        is_of_others = (storages.category == "unknown") & (storages.created_op_id == NONE)
        own = storages.take((storages.allocated_bytes > 0) & (storages.name != ELSEWHERE) & ~is_of_others)
        made = np.append(ops.name, "")[own.created_op_id]
        return Counter(
            zip(own.category.tolist(), own.name.tolist(), own.requested_bytes.tolist(), made.tolist(), strict=True)
        )

    assert told(on_device) == told(on_cpu)
    storages = on_device.table(Storages)
    own = storages.take(storages.allocated_bytes > 0)
    assert (own.allocated_bytes >= own.requested_bytes).all()
    assert (own.allocated_bytes % 512 == 0).all()
    assert set(own.device) == {DEVICE}
    assert build_report(on_device).at_peak.moment.phase == build_report(on_cpu).at_peak.moment.phase


def test_the_history_alone_will_do(source: Path, tmp_path: Path) -> None:
    """Where the job's own profiler receives the events, the allocator's history replaces them, with rounded blocks."""
    twin = Twin(source)
    trace = opened(twin.write(tmp_path / "device", has_reports=False))
    assert trace.manifest.backend.name == "cuda-history"
    for step, (begin, end) in windows(source).items():
        allocated, _, reserved = twin.statistics.peaks(begin, end)
        found = peaks(trace, step)
        assert found[2] == reserved
        assert allocated * 0.9 <= found[0] <= allocated


def test_blocks_of_other_threads_are_those_of_the_history(source: Path, tmp_path: Path) -> None:
    """The profiler gets no reports of them; what is reported still finds its entry."""
    folder = Twin(source).write(tmp_path / "device")
    spool = read_spool(folder)
    epoch = choose_epoch(spool)
    assert epoch is not None
    whole = read_device_events(spool, epoch, DEVICE)
    reports = spool.rows["device_sizes"]
    is_of_thread = np.arange(len(reports)) % 7 == 3
    spool.rows["device_sizes"] = np.concatenate(([[reports[0, 0] - 50_000, 0, 512]], reports[~is_of_thread]))
    part = read_device_events(spool, epoch, DEVICE)
    assert (part.address == whole.address).all()
    assert (part.total == -1).all()
    assert (part.size_bytes == whole.size_bytes).mean() > 0.95
    assert (part.time_ns == whole.time_ns).mean() > 0.7


def test_a_history_of_the_jobs_that_is_too_short_is_noted(source: Path, tmp_path: Path) -> None:
    """Where the job keeps only the latest entries, a note says how many events are missing."""
    folder = Twin(source).write(tmp_path / "device")
    spool = read_spool(folder)
    epoch = choose_epoch(spool)
    assert epoch is not None
    history = spool.rows["history"]
    assert read_device_events(spool, epoch, DEVICE).lost == 0
    is_move = np.isin(history[:, 2], [ACTIONS.index("alloc"), ACTIONS.index("free_requested")])
    gone = np.flatnonzero(is_move)[100:150]
    spool.rows["history"] = np.delete(history, gone, axis=0)
    assert read_device_events(spool, epoch, DEVICE).lost >= 50


def test_operators_take_the_time_of_their_work_on_the_device(source: Path, tmp_path: Path) -> None:
    """An operator takes what its kernels take, those of its parts included; without kernels on a device, nothing."""
    times = read_spool(source).columns("times")
    is_leaf = np.append(times["depth"][1:] <= times["depth"][:-1], True)
    kernels = {int(row): 7_000 for row in np.flatnonzero(is_leaf)}
    trace = opened(Twin(source).write(tmp_path / "device", kernels=kernels))
    assert trace.manifest.op_times == "timed step 3, on the device"
    ops = trace.table(Ops)
    known = ops.duration_us[~np.isnan(ops.duration_us)]
    assert len(known) > 0.75 * (ops.kind != "allocation").sum()
    assert (np.round(known / 7) * 7 == known).all()
    untimed = opened(Twin(source).write(tmp_path / "untimed"))
    assert "not timed" in untimed.manifest.op_times
    assert np.isnan(untimed.table(Ops).duration_us).all()
    assert len(untimed.table(Steps)) == len(trace.table(Steps))
