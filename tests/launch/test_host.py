"""Host memory of a job's processes, sampled from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from memprof.launch.parent import host
from memprof.launch.parent.host import INTERVAL_S, HostSampler
from tests.clocks import Clock

pytestmark = pytest.mark.cold

JOB = """
import multiprocessing, subprocess, sys

def work(ready):
    block = bytearray(30_000_000)
    ready.release()
    import time
    time.sleep(60)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        ready = context.Semaphore(0)
        context.Process(target=work, args=(ready,), daemon=True).start()
        ready.acquire()
    child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=subprocess.PIPE)
    input()
    child.communicate(b"x")
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A job with a forked worker, a spawned worker and another child."""
    (tmp_path / "job.py").write_text(JOB)
    with subprocess.Popen(
        [sys.executable, "job.py"], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.communicate("x")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The sampler's clock, which stands still."""
    clock = Clock()
    monkeypatch.setattr(host, "time", clock)
    return clock


def samples(spool: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (spool / "host.jsonl").read_text().splitlines()]


def test_every_process_has_its_role(job: subprocess.Popen[str], tmp_path: Path) -> None:
    """Trainer, workers by fork and by spawn, and other children are distinguished."""
    (tmp_path / f"process-{job.pid}").mkdir()
    HostSampler(tmp_path, job.pid).sample_if_due()
    roles = [sample["role"] for sample in samples(tmp_path)]
    # The spawned worker comes with multiprocessing's resource tracker, which is no worker.
    assert sorted(roles) == ["child", "child", "trainer", "worker", "worker"]
    trainer = next(sample for sample in samples(tmp_path) if sample["role"] == "trainer")
    assert trainer["pid"] == job.pid


def test_figures_are_bytes_and_unix_microseconds(job: subprocess.Popen[str], tmp_path: Path) -> None:
    """A worker that holds 30 MB shows them as resident and as private; the moment is now."""
    (tmp_path / f"process-{job.pid}").mkdir()
    HostSampler(tmp_path, job.pid).sample_if_due()
    workers = [sample for sample in samples(tmp_path) if sample["role"] == "worker"]
    for worker in workers:
        assert 30_000_000 < worker["rss_bytes"] < 300_000_000
        assert 30_000_000 < worker["private_bytes"] <= worker["rss_bytes"]
        assert abs(worker["time_us"] - time.time() * 1e6) < 60e6


def test_private_memory_is_read_rarely(job: subprocess.Popen[str], tmp_path: Path, clock: Clock) -> None:
    """Private memory, which takes the system long to count, is null in the samples right after."""
    sampler = HostSampler(tmp_path, job.pid)
    sampler.sample_if_due()
    sampler.sample_if_due()  # too soon: not a sample
    clock.now_s += INTERVAL_S
    assert sampler.seconds_to_next() == 0.0
    sampler.sample_if_due()
    own = [sample["private_bytes"] for sample in samples(tmp_path) if sample["pid"] == job.pid]
    assert len(own) == 2
    assert own[0] > 0
    assert own[1] is None


def test_process_becomes_a_trainer(job: subprocess.Popen[str], tmp_path: Path, clock: Clock) -> None:
    """A process is a trainer from the moment something of it is recorded."""
    sampler = HostSampler(tmp_path, job.pid)
    sampler.sample_if_due()
    (tmp_path / f"process-{job.pid}").mkdir()
    clock.now_s += INTERVAL_S
    sampler.sample_if_due()
    assert [sample["role"] for sample in samples(tmp_path) if sample["pid"] == job.pid] == ["child", "trainer"]
    assert {sample["role"] for sample in samples(tmp_path)} == {"child", "trainer", "worker"}


def test_ended_processes_are_left_out(tmp_path: Path) -> None:
    """A process that ended, waited for or not, has no sample, and nothing is raised."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)
        HostSampler(tmp_path, process.pid).sample_if_due()
    HostSampler(tmp_path, process.pid).sample_if_due()
    assert samples(tmp_path) == []


def test_lost_spool_ends_the_samples(tmp_path: Path) -> None:
    """Where the spool cannot be written any more, sampling ends and the job is not disturbed."""
    sampler = HostSampler(tmp_path / "absent", os.getpid())
    sampler.sample_if_due()
    assert sampler.is_failing


@pytest.mark.parametrize(("looked_at", "took_s", "rest_s"), [("children", 0.02, 0.0), ("memory_full_info", 0.2, 5.0)])
def test_a_costly_look_is_repeated_after_a_hundred_times_what_it_took(
    looked_at: str, took_s: float, rest_s: float, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing processes and reading private memory take a hundredth of one core, whatever else runs; sampling goes on.

    Over two minutes of samples; private memory is read every five seconds at most, however little that takes.
    """
    looked_s: list[float] = []
    look: Any = getattr(psutil.Process, looked_at)

    def costly(process: psutil.Process, **options: bool) -> Any:
        if process.pid == os.getpid():
            looked_s.append(clock.now_s)
            clock.now_s += took_s
        return look(process, **options)

    monkeypatch.setattr(psutil.Process, looked_at, costly)
    sampler = HostSampler(tmp_path, os.getpid())
    while clock.now_s < 120.0:
        sampler.sample_if_due()
        clock.now_s += sampler.seconds_to_next()
    gaps = [later - earlier - took_s for earlier, later in pairwise(looked_s)]
    rest_s = max(rest_s, 100 * took_s)
    assert min(gaps) >= rest_s - 1e-6
    assert max(gaps) <= rest_s + INTERVAL_S + took_s
    own = [sample["time_us"] for sample in samples(tmp_path) if sample["pid"] == os.getpid()]
    assert len(own) >= 120.0 / (INTERVAL_S + took_s)
