"""A light recording follows every step of a run: counts are correct, events are exact, the job is unchanged."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import memprof
from memprof.recorder.light.allocators import AllocatorCount
from memprof.recorder.light.events import Budget
from memprof.recorder.profiler.native import AllocatorTable
from memprof.replay.live import live_bytes
from memprof.trace.schema import NONE, ModulePeaks, Modules, Ops, OutOfMemory, StepPeaks, Steps, Storages
from memprof.trace.store import Trace
from tests.truth import measure

_MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters())
def train(batch):
    x, y = torch.randn(batch, 64), torch.randint(0, 10, (batch,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""
_STEPS = _MODEL + "print(*[train(512 if step == 7 else 64).item() for step in range(12)])\n"

#: How a job ended, and its recording.
WholeRun = tuple[subprocess.CompletedProcess[str], Path]


def _record(folder: Path, script: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Records a script lightly; returns how that ended, and where the trace is."""
    path = folder / "job.py"
    path.write_text(script)
    command = [sys.executable, "-m", "memprof.cli.main", "record", "--light", "-f", "-o", "run.memprof", "job.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done, folder / "run.memprof"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """Twelve steps, of which one has the large batch: how the job ended, and its recording."""
    done, path = _record(tmp_path_factory.mktemp("whole"), _STEPS)
    assert done.returncode == 0, done.stderr
    return done, path


def test_every_step_that_was_heard_has_the_allocators_own_highest_count(whole_run: WholeRun) -> None:
    """The highest count of each step is, to the byte, what the allocator itself writes on stderr in a plain run."""
    _, path = whole_run
    peaks = Trace.open(path).table(StepPeaks)
    truth = [update.peak_bytes for update in measure(path.with_name("job.py")).updates]
    assert peaks.step.tolist() == list(range(12))
    merged_lives = np.flatnonzero(peaks.how == "heard")
    merged_lives = merged_lives[merged_lives > 0]  # the truth of the first step holds the making of the model, too
    assert len(merged_lives) >= 2
    assert [int(peaks.allocated_bytes[step]) for step in merged_lives] == [truth[step] for step in merged_lives]
    # What was only counted, at the edges of module calls, is never too high.
    assert all(count <= true for count, true in zip(peaks.allocated_bytes.tolist()[1:], truth[1:], strict=True))


def test_the_step_with_the_large_batch_is_the_highest_of_the_run(whole_run: WholeRun) -> None:
    """Step 7 has eight times the batch of the others: the table, the sentence and the report's first lines name it."""
    done, path = whole_run
    peaks = Trace.open(path).table(StepPeaks)
    assert int(peaks.step[np.argmax(peaks.allocated_bytes)]) == 7
    assert "of 12 steps, step 7 peaked highest" in done.stderr
    command = [sys.executable, "-m", "memprof.cli.main", "report", str(path)]
    report = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "step 7 peaked highest" in "".join(report.splitlines(keepends=True)[:3])


def test_the_last_stretch_is_told_like_any_recording(whole_run: WholeRun) -> None:
    """Its replay is sound and exact, and every allocation has its step, phase and module."""
    _, path = whole_run
    trace = Trace.open(path)
    peaks, modules = trace.table(StepPeaks), trace.table(Modules)
    assert trace.manifest.backend.name == "cpu-light"
    assert trace.manifest.capture.is_complete
    for number in trace.recorded_steps:
        step = trace.step(number)
        step.check()
        highest = int(live_bytes(step).during.max())
        assert highest == int(peaks.allocated_bytes[peaks.step == number][0])
        linear = [row for row, kind in enumerate(modules.type.tolist()) if kind == "Linear"]
        for phase in ("forward", "backward"):
            seen = set(step.ops.module_id[step.ops.phase == phase].tolist())
            assert seen >= set(linear), phase
        saved = step.storages.category == "activation"
        # Forward keeps for backward what each ReLU returns, 64 x 256 floats, and the input of the first layer.
        assert step.storages.allocated_bytes[saved].max() == 64 * 256 * 4
        known = step.storages.category[step.storages.created_op_id == NONE]
        assert {"parameter", "optimizer_state"} <= set(known.tolist())


def test_the_highest_count_of_each_module_is_kept_with_its_step(whole_run: WholeRun) -> None:
    """In forward of the second ReLU, its own output of step 7 is there: more than in any other step."""
    _, path = whole_run
    trace = Trace.open(path)
    places, modules = trace.table(ModulePeaks), trace.table(Modules)
    row = modules.name.tolist().index("3")
    mine = places.take((places.module_id == row) & (places.phase == "forward"))
    assert mine.step.tolist() == [7]
    # Model, gradients and two moments of each, and three activations of 512 x 256 floats.
    parameters = sum(p.nbytes for p in _layers())
    assert int(mine.allocated_bytes[0]) > 4 * parameters + 3 * 512 * 256 * 4 - 4 * 4096
    assert len(mine) == 1


def _layers() -> list[torch.nn.Parameter]:
    sizes = ((64, 256), (256, 256), (256, 10))
    return [parameter for sides in sizes for parameter in torch.nn.Linear(*sides).parameters()]


def test_the_manifest_names_the_machine_and_its_clock(whole_run: WholeRun) -> None:
    """As a full recording does: ranks are put on one axis by them."""
    manifest = Trace.open(whole_run[1]).manifest
    assert manifest.node == platform.node()
    assert manifest.clock


_CHECKPOINTS = """
import io, torch, traceback
from torch import nn
model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    optimizer.zero_grad()
    model(torch.randn(8, 256)).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    states = torch.load(file)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    del states
try:
    torch.load(io.BytesIO(b"no checkpoint"))
except Exception:
    traceback.print_exc()
"""


def test_saving_and_loading_are_phases_and_their_tracebacks_are_unchanged(tmp_path: Path) -> None:
    """Weights and state are there twice when they are loaded, which is the peak; torch's functions stay its own."""
    done, path = _record(tmp_path, _CHECKPOINTS)
    assert done.returncode == 0, done.stderr
    trace = Trace.open(path)
    peaks = trace.table(StepPeaks)
    assert peaks.phase[np.argmax(peaks.allocated_bytes)] == "loading"
    assert {"saving", "loading"} <= set(trace.table(ModulePeaks).phase)
    plain = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    told = "".join(line for line in done.stderr.splitlines(keepends=True) if not line.startswith("memprof: "))
    assert told == plain.stderr
    assert "Traceback" in told


def test_a_killed_job_leaves_its_ring(tmp_path: Path) -> None:
    """After SIGKILL the counts up to the last second are there, and the last complete stretch."""
    script = _MODEL + (
        "import os, signal, time\n"
        "end = time.time() + 2.5\n"
        "while time.time() < end:\n"
        "    train(64)\n"
        "    time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done, path = _record(tmp_path, script)
    assert done.returncode == -signal.SIGKILL
    trace = Trace.open(path)
    assert len(trace.table(StepPeaks)) >= 5
    assert len(trace.recorded_steps) >= 1
    assert not trace.manifest.capture.is_complete
    assert "killed by SIGKILL" in trace.manifest.capture.reason
    trace.steady_step().check()


def test_an_error_keeps_its_status_and_place(tmp_path: Path) -> None:
    """The traceback and the status are the job's; the recording ends in the module that failed."""
    script = _MODEL + "for batch in (64, 64, 64):\n    train(batch)\nmodel(torch.randn(4, 63)).sum().backward()\n"
    done, path = _record(tmp_path, script)
    assert done.returncode == 1
    plain = subprocess.run([sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith("memprof: ")]
    assert "".join(ours) == plain.stderr
    assert Trace.open(path).manifest.capture.ends_at == "step 3, forward of 0"


def test_running_out_of_memory_is_told(tmp_path: Path) -> None:
    """The failed request is in the trace with its step, and the post-mortem on stderr."""
    script = _MODEL + (
        "import resource\n"
        "for step in range(5): train(64)\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1))\n"
        "train(1_000_000)\n"
    )
    done, path = _record(tmp_path, script)
    assert done.returncode == 1
    table = Trace.open(path).table(OutOfMemory)
    assert table.requested_bytes.tolist() == [1_000_000 * 64 * 4]
    assert table.step.tolist() == [5]
    assert not table.is_caught[0]
    assert "memprof: out of memory" in done.stderr
    assert "memprof suggest" not in done.stderr  # nothing can be predicted from it


def test_a_job_without_optimizer_has_a_step_for_each_call(tmp_path: Path) -> None:
    """Inference is followed, too."""
    script = (
        "import torch\nmodel = torch.nn.Linear(8, 8)\n"
        "with torch.no_grad():\n    for size in range(1, 7): model(torch.randn(size, 8))\n"
    )
    done, path = _record(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert Trace.open(path).table(StepPeaks).step.tolist() == list(range(6))


def test_the_jobs_own_profiler_is_not_disturbed(tmp_path: Path) -> None:
    """The job's profiler gets its own events, and the recording pauses until it is done."""
    script = _MODEL + (
        "from torch.profiler import profile\n"
        "train(64)\n"
        "with profile(profile_memory=True) as own: train(64)\n"
        "print(sum(event.self_cpu_memory_usage > 0 for event in own.events()) > 10)\n"
        "for _ in range(3): train(64)\n"
    )
    done, path = _record(tmp_path, script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"
    assert len(Trace.open(path).table(StepPeaks)) == 5


def test_nothing_can_be_predicted_from_it_and_that_is_said(whole_run: WholeRun) -> None:
    """`suggest` refuses a recording without operators, and says how to make one with them."""
    _, path = whole_run
    command = [sys.executable, "-m", "memprof.cli.main", "suggest", str(path), "--budget", "1MiB"]
    suggest = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert suggest.returncode == 5
    assert "was recorded with --light" in suggest.stderr


def test_a_plan_is_applied_in_light_mode(tmp_path: Path) -> None:
    """Checkpointing in force shows: the ReLUs run again inside backward, and the manifest names the plan."""
    (tmp_path / "job.py").write_text(_STEPS)
    command = [sys.executable, "-m", "memprof.cli.main", "record", "--light", "--checkpoint", "."]
    command += ["-o", "run.memprof", "job.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    trace = Trace.open(tmp_path / "run.memprof")
    assert trace.manifest.plan is not None
    ops = trace.table(Ops)
    assert (ops.is_recompute & (ops.phase == "backward")).any()


def test_a_part_of_a_script_is_followed_inline(tmp_path: Path) -> None:
    """`memprof.record(..., light=True)` follows every step of the block."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memprof.record(tmp_path / "run.memprof", light=True):
        for _ in range(5):
            model(torch.randn(8, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    trace = Trace.open(tmp_path / "run.memprof")
    assert len(trace.table(StepPeaks)) == 5
    assert trace.table(Steps).is_complete.all()
    assert len(trace.table(Storages))


def test_the_count_that_is_read_is_the_allocators() -> None:
    """It moves by the bytes of a tensor, up and down."""
    table, count = AllocatorTable(), AllocatorCount()
    table.switch_on(is_late=True)
    try:
        assert count.find()
        before = count.read()
        tensor = torch.empty(12_345, dtype=torch.uint8)
        assert count.read() - before == tensor.nbytes
        del tensor
        assert count.read() == before
    finally:
        table.switch_off()


def test_listening_ends_when_it_takes_too_much() -> None:
    """A stretch with more events than the limit is the last."""
    import time

    budget = Budget()
    assert budget.may_listen()
    budget.spend(time.thread_time_ns(), 10)
    assert budget.may_listen()
    budget.spend(time.thread_time_ns() - 10**12, 10)  # 1,000 s spent in no time at all
    assert not budget.may_listen()
    fresh = Budget()
    fresh.spend(time.thread_time_ns(), 10**6)
    assert not fresh.may_listen()


@pytest.mark.parametrize("option", [["--steps", "2"], ["--skip", "1"], ["--stop"]])
def test_a_window_beside_light_is_refused(tmp_path: Path, option: list[str]) -> None:
    """A window and the whole run exclude each other: nothing is started."""
    (tmp_path / "job.py").write_text("print('started')\n")
    command = [sys.executable, "-m", "memprof.cli.main", "record", "--light", *option, "job.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 125
    assert done.stdout == ""
    assert f"{option[0]} does not apply: --light has no window" in done.stderr
