"""The recording machine's speed, measured after the job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.launch.outcome.output import add_speed, write_exit
from memprof.launch.parent import speed
from memprof.launch.parent.speed import machine_speed, measure_speed
from memprof.machines.host_limits import HostLimit
from memprof.trace.assemble.describe import JobRecords
from memprof.trace.manifest import Speed
from memprof.trace.store import Trace
from tests.clocks import Clock

TRAINING = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
print(torch.rand(1).item().hex())
"""


def test_speeds_are_those_of_a_machine() -> None:
    """Memory and products have rates that a processor of this century can have, and the threads are said."""
    measured = measure_speed()
    assert 100 < measured.memory_bytes_per_us < 10_000_000
    assert measured.memory_bytes_per_us == 2 * measured.to_host_bytes_per_us
    assert 50 < measured.fp32_flops_per_us < 100_000_000
    assert 1 <= measured.threads <= (os.cpu_count() or 1)
    assert measured.how.startswith("measured with numpy on")


def test_a_process_measures_once_unless_it_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings of one process hold the same speeds; with other threads, or where memory was short, it is measured."""
    monkeypatch.setattr(speed, "_measured", {})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with monkeypatch.context() as short:
        short.setattr(speed, "free_memory", lambda: HostLimit(2**30, 0))
        assert machine_speed().memory_bytes_per_us == 0
    found = machine_speed()
    assert found.memory_bytes_per_us > 0
    assert machine_speed() is found
    monkeypatch.setattr(speed, "_threads", lambda: 2)
    assert machine_speed().threads == 2


def test_measuring_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is measured runs once to warm up and then for a fixed while; what takes longer than that, once."""
    clock = Clock()
    monkeypatch.setattr(speed, "time", clock)
    for took_s, times in ((speed._SECONDS / 4, 4), (10 * speed._SECONDS, 1)):
        runs: list[float] = []

        def run(took_s: float = took_s, runs: list[float] = runs) -> None:
            runs.append(took_s)
            clock.now_s += took_s

        assert speed._fastest_us(run) == pytest.approx(took_s * 1e6)
        assert len(runs) == 1 + times


def test_little_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where little memory is free, its bandwidth is not measured rather than the cache's: it stays unknown."""
    monkeypatch.setattr(speed, "free_memory", lambda: HostLimit(2**30, 64 * 2**20))
    measured = measure_speed()
    assert (measured.memory_bytes_per_us, measured.to_host_bytes_per_us) == (0.0, 0.0)
    assert measured.fp32_flops_per_us > 0


def test_threads_follow_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job limited to one thread is compared with one thread."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert measure_speed().threads == 1


def test_recording_holds_the_speed_and_the_job_is_the_same(tmp_path: Path) -> None:
    """The manifest says how fast the machine is; losses and random numbers are those of the job without memprof."""
    (tmp_path / "train.py").write_text(TRAINING)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMPROF_")}
    plain, recorded = (
        subprocess.run(
            [sys.executable, "-P", *words, "train.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        for words in ([], ["-m", "memprof.cli.main", "record", "-o", "run.memprof"])
    )
    assert recorded.stdout == plain.stdout
    measured = Trace.open(tmp_path / "run.memprof").manifest.machine.speed
    assert measured.memory_bytes_per_us > 0
    assert measured.fp32_flops_per_us > 0
    assert "after the job" in measured.how


def test_speed_goes_through_the_spool(tmp_path: Path) -> None:
    """The parent's figures are in exit.json with the job's result; those of a device in the job take precedence."""
    write_exit(tmp_path, 3)
    add_speed(tmp_path, Speed(memory_bytes_per_us=5.0, threads=2))
    ended = json.loads((tmp_path / "exit.json").read_text())
    assert ended["returncode"] == 3
    process = tmp_path / "process-1"
    process.mkdir()
    assert JobRecords(process, {}, ended).speed == Speed(memory_bytes_per_us=5.0, threads=2)
    (process / "speed.json").write_text(json.dumps({"memory_bytes_per_us": 7.0, "how": "on the device"}))
    assert JobRecords(process, {}, ended).speed == Speed(memory_bytes_per_us=7.0, how="on the device")


def test_full_disk_keeps_how_the_job_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the speed cannot be written, exit.json is unchanged, and no other file is left."""
    write_exit(tmp_path, 3)
    before = (tmp_path / "exit.json").read_text()

    def full(path: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    add_speed(tmp_path, Speed(memory_bytes_per_us=5.0))
    assert (tmp_path / "exit.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["exit.json"]


@pytest.mark.parametrize("text", ["{", "[1]", '{"memory_bytes_per_us": "fast"}'])
def test_damaged_speed_is_no_speed(tmp_path: Path, text: str) -> None:
    """A recording is read whatever became of the file that says how fast its machine was."""
    (tmp_path / "speed.json").write_text(text)
    assert JobRecords(tmp_path, {}, {"returncode": 0}).speed == Speed()
    assert JobRecords(tmp_path, {}, None).speed == Speed()
