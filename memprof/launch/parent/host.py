"""Samples the host memory of every process of a running job, from outside."""

from __future__ import annotations

import json
import time
from pathlib import Path

import psutil

from memprof.trace.files.private_file import open_private

#: Sampling interval, in seconds.
INTERVAL_S = 0.5
#: Minimum interval between two readings of a process's private memory, in seconds.
_PRIVATE_INTERVAL_S = 5.0
#: After a costly query, the next one waits this many times the query's duration.
_REST = 100.0


class HostSampler:
    """Appends one line per process to ``host.jsonl`` in the spool folder, twice a second.

    Slow queries (listing all processes, and private memory, for which the kernel walks every page of the process) are
    repeated only after a hundred times their duration, so they never cost more than a hundredth of a core.
    """

    def __init__(self, spool: Path, job_pid: int) -> None:
        """Prepares sampling.

        Args:
            spool: The recording's spool folder.
            job_pid: Process id of the job's first process.
        """
        self._spool = spool
        self._job_pid = job_pid
        self._processes: dict[int, psutil.Process] = {}
        self._workers: set[int] = set()
        self._next_sample = 0.0
        self._next_listing = 0.0
        self._next_private: dict[int, float] = {}
        self.is_failing = False

    def seconds_to_next(self) -> float:
        """Returns the seconds until the next sample is due."""
        return max(0.0, self._next_sample - time.monotonic())

    def sample_if_due(self) -> None:
        """Takes a sample unless the last one is younger than the interval."""
        now = time.monotonic()
        if now < self._next_sample or self.is_failing:
            return
        self._next_sample = now + INTERVAL_S
        if now >= self._next_listing:
            self._list_processes()
            self._next_listing = time.monotonic() + _REST * (time.monotonic() - now)
        lines = [json.dumps(sample) + "\n" for pid in list(self._processes) if (sample := self._sample(pid))]
        try:
            with open_private(self._spool / "host.jsonl", "a", encoding="utf-8") as file:
                file.writelines(lines)
        except OSError:
            # The disk is full or the folder is gone: the job continues, and the samples so far show when they stopped.
            self.is_failing = True

    def _list_processes(self) -> None:
        """Finds new processes of the job. Known ones stay, even after their parent has died."""
        try:
            job = psutil.Process(self._job_pid)
            found = [job, *job.children(recursive=True)]
        except psutil.Error:
            return
        for process in found:
            known = self._processes.get(process.pid)
            if known is None or known != process:
                self._processes[process.pid] = process
                self._workers.discard(process.pid)

    def _sample(self, pid: int) -> dict[str, object] | None:
        process = self._processes[pid]
        try:
            rss_bytes = process.memory_info().rss
            if not rss_bytes:
                # A zombie: it has ended, but its parent has not reaped it yet.
                return None
            role = self._role(process)
            private_bytes = self._private_bytes(process)
        except psutil.Error:
            del self._processes[pid]
            return None
        return {
            "time_us": time.time_ns() / 1000,
            "pid": pid,
            "role": role,
            "rss_bytes": rss_bytes,
            "private_bytes": private_bytes,
        }

    def _private_bytes(self, process: psutil.Process) -> int | None:
        start = time.monotonic()
        if start < self._next_private.get(process.pid, 0.0):
            return None
        try:
            return int(process.memory_full_info().uss)
        finally:
            end = time.monotonic()
            self._next_private[process.pid] = end + max(_PRIVATE_INTERVAL_S, _REST * (end - start))

    def _role(self, process: psutil.Process) -> str:
        """Returns a process's role in the job; what looked like a plain child can turn out to be a trainer."""
        if (self._spool / f"process-{process.pid}").is_dir():
            return "trainer"
        if process.pid not in self._workers and not self._is_worker(process):
            return "child"
        self._workers.add(process.pid)
        return "worker"

    def _is_worker(self, process: psutil.Process) -> bool:
        """Returns whether multiprocessing started the process, below a trainer."""
        command = process.cmdline()
        ancestors = [ancestor for ancestor in process.parents() if ancestor.pid in self._processes]
        if not any((self._spool / f"process-{ancestor.pid}").is_dir() for ancestor in ancestors):
            return False
        # A spawned worker is marked on its command line; a forked one has its parent's command line.
        return "--multiprocessing-fork" in command or command == ancestors[0].cmdline()
