"""Samples the host memory of every process of a running job, and its limits, from outside."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from memprof.machines.host_limits import named_limits
from memprof.trace.files.private_file import open_private

#: Sampling interval, in seconds.
INTERVAL_S = 0.5
#: After a costly query, the next of its kind waits this many times its processor time: half a hundredth of a core for
#: each of the two kinds.
_REST = 200.0
#: The memory of all processes is divided into kinds at most about this often over a run.
_MOST_DIVISIONS = 1000
#: A process is written again when its resident memory has changed by this share and by these bytes; both double each
#: time this many lines have been written, so that days of sampling stay within megabytes.
_CHANGE, _CHANGE_BYTES, _LINES = 1 / 64, 2**20, 10_000
_PROC = Path("/proc")
#: Keys of a sample by the names that the kernel sums a process's mappings under (``proc/PID/smaps_rollup``). Several
#: processes have a page in equal shares, so that those of a job sum to what it uses.
_KINDS = {
    "Pss_Anon": "anonymous_bytes",
    "Pss_Shmem": "shared_bytes",
    "Pss_File": "file_bytes",
    "SwapPss": "swapped_bytes",
    "Private_Clean": "private_bytes",
    "Private_Dirty": "private_bytes",
    "VmHWM": "peak_rss_bytes",  # in proc/PID/status
}


@dataclass
class _Process:
    """One process of the job, and its role and resident memory when it was last written."""

    process: psutil.Process
    is_worker: bool = False
    role: str = ""
    written_bytes: int = 0


class HostSampler:
    """Appends lines to ``host.jsonl`` in the spool folder: processes whose memory has changed, and the limits.

    Slow queries (listing all processes, and the kinds of memory, for which the kernel walks every page of a process)
    are repeated only after two hundred times their processor time: together a hundredth of a core.
    """

    def __init__(self, spool: Path, job_pid: int) -> None:
        """Prepares sampling.

        Args:
            spool: The recording's spool folder.
            job_pid: Process id of the job's first process.
        """
        self._spool = spool
        self._job_pid = job_pid
        self._processes: dict[int, _Process] = {}
        self._began = time.monotonic()
        self._next_sample = self._next_listing = self._next_division = 0.0
        self._lines = 0
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
            start = time.process_time()
            self._list_processes()
            self._next_listing = now + _REST * (time.process_time() - start)
        is_division = now >= self._next_division
        start = time.process_time()
        samples = [sample for pid in list(self._processes) if (sample := self._sample(pid, is_division))]
        if is_division:
            samples += [
                {"limit": name, "total_bytes": limit.total_bytes, "free_bytes": limit.free_bytes}
                for name, limit in named_limits().items()
            ]
            spent, end = time.process_time() - start, time.monotonic()
            self._next_division = end + max(_REST * spent, (end - self._began) / _MOST_DIVISIONS)
        self._lines += len(samples)
        common = {"time_us": time.time_ns() / 1000}  # of all: they are told apart from other rounds by it
        try:
            with open_private(self._spool / "host.jsonl", "a", encoding="utf-8") as file:
                file.writelines(json.dumps(common | sample) + "\n" for sample in samples)
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
            if known is None or known.process != process:
                self._processes[process.pid] = _Process(process)

    def _sample(self, pid: int, is_division: bool) -> dict[str, object] | None:
        """Returns a line about a process, None where nothing has changed or it has ended."""
        known = self._processes[pid]
        try:
            memory = known.process.memory_info()
            rss_bytes = memory.rss
            if not rss_bytes:  # a zombie: it has ended, but its parent has not reaped it yet
                return self._end(pid)
            change, doubled = abs(rss_bytes - known.written_bytes), 2 ** (self._lines // _LINES)
            role = self._role(known, is_looked_up=is_division or not known.role)
            is_same = role == known.role and change < doubled * max(_CHANGE_BYTES, _CHANGE * known.written_bytes)
            if is_same and not is_division:
                return None
        except psutil.Error:
            return self._end(pid)
        known.written_bytes, known.role = rss_bytes, role
        kinds = read_kinds(pid) if is_division else {}
        if hasattr(memory, "shared"):  # Linux: files and shared memory
            kinds["heap_bytes"] = rss_bytes - memory.shared
        return {"pid": pid, "role": role, "rss_bytes": rss_bytes, **kinds}

    def _end(self, pid: int) -> dict[str, object] | None:
        """Returns the last line about a process: it has no memory left; None where it had none before."""
        known = self._processes.pop(pid)
        return {"pid": pid, "role": known.role, "rss_bytes": 0} if known.written_bytes else None

    def _role(self, known: _Process, *, is_looked_up: bool) -> str:
        """Returns a process's role in the job; what looked like a plain child can turn out to be a trainer."""
        if (self._spool / f"process-{known.process.pid}").is_dir():
            return "trainer"
        known.is_worker = known.is_worker or (is_looked_up and self._is_worker(known.process))
        return "worker" if known.is_worker else "child"

    def _is_worker(self, process: psutil.Process) -> bool:
        """Returns whether multiprocessing started the process, below a trainer."""
        command = process.cmdline()
        ancestors = [ancestor for ancestor in process.parents() if ancestor.pid in self._processes]
        if not any((self._spool / f"process-{ancestor.pid}").is_dir() for ancestor in ancestors):
            return False
        # A spawned worker is marked on its command line; a forked one has its parent's command line.
        return "--multiprocessing-fork" in command or command == ancestors[0].cmdline()


def read_kinds(pid: int, proc: Path = _PROC) -> dict[str, int]:
    """Returns the kinds of a process's memory in bytes, by the keys of a sample; none where it is unknown."""
    kinds: dict[str, int] = {}
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text(encoding="utf-8").splitlines()
        lines += (proc / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # it has ended, belongs to another user, or the kernel is older than 4.14
        return kinds
    for line in lines:
        name, _, rest = line.partition(":")
        if name in _KINDS:
            kinds[_KINDS[name]] = kinds.get(_KINDS[name], 0) + 1024 * int(rest.split()[0])
    return kinds
