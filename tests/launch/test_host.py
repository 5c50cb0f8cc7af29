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
from types import SimpleNamespace
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
    roles = [sample["role"] for sample in samples(tmp_path) if "limit" not in sample]
    # The spawned worker comes with multiprocessing's resource tracker, which is no worker.
    assert sorted(roles) == ["child", "child", "trainer", "worker", "worker"]
    trainer = next(sample for sample in samples(tmp_path) if sample.get("role") == "trainer")
    assert trainer["pid"] == job.pid


def test_figures_are_bytes_and_unix_microseconds(job: subprocess.Popen[str], tmp_path: Path) -> None:
    """A worker that holds 30 MB shows them as resident and as private; the moment is now."""
    (tmp_path / f"process-{job.pid}").mkdir()
    HostSampler(tmp_path, job.pid).sample_if_due()
    workers = [sample for sample in samples(tmp_path) if sample.get("role") == "worker"]
    for worker in workers:
        assert 30_000_000 < worker["rss_bytes"] < 300_000_000
        assert 30_000_000 < worker["private_bytes"] <= worker["rss_bytes"]
        assert abs(worker["time_us"] - time.time() * 1e6) < 60e6


def test_kinds_sum_to_what_the_process_has(job: subprocess.Popen[str], tmp_path: Path) -> None:
    """Of each process the shares of all kinds sum to its proportional bytes, as the system states them."""
    HostSampler(tmp_path, job.pid).sample_if_due()
    for sample in (one for one in samples(tmp_path) if one.get("role") == "worker"):
        lines = Path(f"/proc/{sample['pid']}/smaps_rollup").read_text().splitlines()
        (stated,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        kinds = sum(sample[name] for name in ("anonymous_bytes", "shared_bytes", "file_bytes"))
        assert kinds == pytest.approx(stated, rel=0.03)


def test_unchanged_processes_are_left_out(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two divisions into kinds a process has a line where its memory has changed, and no other."""
    clock.step_s = 0.1  # which makes every division cost
    sampler = HostSampler(tmp_path, os.getpid())
    for size in (10, 10, 14, 14):
        memory = SimpleNamespace(rss=size << 20, shared=1 << 20)
        monkeypatch.setattr(psutil.Process, "memory_info", lambda _, memory=memory: memory)
        sampler.sample_if_due()
        clock.now_s = (clock.now_s // INTERVAL_S + 1) * INTERVAL_S
    own = [one for one in samples(tmp_path) if one.get("pid") == os.getpid()]
    assert [(one["rss_bytes"] >> 20, one["heap_bytes"] >> 20) for one in own] == [(10, 9), (14, 13)]
    assert ["anonymous_bytes" in one for one in own] == [True, False]


def test_process_becomes_a_trainer(job: subprocess.Popen[str], tmp_path: Path, clock: Clock) -> None:
    """A process is a trainer from the moment something of it is recorded."""
    sampler = HostSampler(tmp_path, job.pid)
    sampler.sample_if_due()
    (tmp_path / f"process-{job.pid}").mkdir()
    clock.now_s += INTERVAL_S
    sampler.sample_if_due()
    assert [sample["role"] for sample in samples(tmp_path) if sample.get("pid") == job.pid] == ["child", "trainer"]
    assert {sample["role"] for sample in samples(tmp_path) if "role" in sample} == {"child", "trainer", "worker"}


def test_ended_processes_are_left_out(tmp_path: Path) -> None:
    """A process that ended, waited for or not, has no sample, and nothing is raised."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        while Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.01)
        HostSampler(tmp_path, process.pid).sample_if_due()
    HostSampler(tmp_path, process.pid).sample_if_due()
    assert all("limit" in sample for sample in samples(tmp_path))


def test_the_end_of_a_process_is_a_sample(tmp_path: Path, clock: Clock) -> None:
    """The last sample of a process that has ended says that nothing is left, once."""
    with subprocess.Popen(["sleep", "60"]) as process:
        sampler = HostSampler(tmp_path, process.pid)
        sampler.sample_if_due()
        process.kill()
        process.wait()
        for _ in range(2):
            clock.now_s += INTERVAL_S
            sampler.sample_if_due()
    sizes = [one["rss_bytes"] for one in samples(tmp_path) if "pid" in one]
    assert sizes[0] > 0
    assert sizes[1:] == [0]


def test_lost_spool_ends_the_samples(tmp_path: Path) -> None:
    """Where the spool cannot be written any more, sampling ends and the job is not disturbed."""
    sampler = HostSampler(tmp_path / "absent", os.getpid())
    sampler.sample_if_due()
    assert sampler.is_failing


@pytest.mark.parametrize(("place", "name", "took_s"), [(psutil.Process, "children", 0.02), (host, "read_kinds", 0.2)])
def test_a_costly_look_is_repeated_after_two_hundred_times_what_it_took(
    place: Any, name: str, took_s: float, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing processes and dividing their memory take half a hundredth of one core each, whatever else runs."""
    looked_s: list[float] = []
    look: Any = getattr(place, name)

    def costly(process: Any, **options: bool) -> Any:
        if process == os.getpid() or getattr(process, "pid", 0) == os.getpid():
            looked_s.append(clock.now_s)
            clock.now_s += took_s
        return look(process, **options)

    monkeypatch.setattr(place, name, costly)
    sampler = HostSampler(tmp_path, os.getpid())
    while clock.now_s < 120.0:
        sampler.sample_if_due()
        clock.now_s += sampler.seconds_to_next()
    gaps = [later - earlier - took_s for earlier, later in pairwise(looked_s)]
    assert min(gaps) >= 200 * took_s - took_s - 1e-6
    assert max(gaps) <= 200 * took_s + INTERVAL_S + took_s
