"""Measures the recording machine's speed: memory, copies and matrix products, with numpy alone.

It runs in memprof's own process once the job has ended and its exit status is on disk, so that it cannot slow the job
down, take memory from it, or consume its random numbers. The job's own processes never measure a CPU. (A CUDA device
is measured in the job, at its very end: ``memprof.recorder.profiler.timing``.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from memprof.machines.host_limits import free_memory
from memprof.trace.manifest import Speed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats32 = npt.NDArray[np.float32]

#: Duration of each of the two measurements, in seconds. The fastest run counts: other load can only slow it down.
_SECONDS = 0.06
#: Size in bytes of each of the two copied arrays; more than a CPU's share of last-level cache.
_COPY_BYTES = 64 * 2**20
#: Maximum fraction of the free memory to use.
_SHARE = 1 / 16
#: Below this size in bytes, the cache is measured instead of memory.
_LEAST_COPY_BYTES = 8 * 2**20
#: Rows and columns of the matrices: large enough for the full rate, small enough for a slow core.
_ROWS = 512

#: What this process has measured, by number of threads.
_measured: dict[int, Speed] = {}


def machine_speed() -> Speed:
    """Returns the speeds as measured once in this process: a search with dry runs writes many recordings.

    Returns:
        As `measure_speed`; speeds that could not be measured are measured again at the next call.
    """
    threads = _threads()
    found = _measured.get(threads)
    if found is None:
        found = measure_speed()
        if found.memory_bytes_per_us and found.fp32_flops_per_us:
            _measured[threads] = found
    return found


def measure_speed() -> Speed:
    """Measures memory bandwidth and the rate of fp32 products, in about 0.2 seconds.

    Returns:
        The speeds; 0 for those that could not be measured for lack of memory.
    """
    import numpy as np  # imported here: the parent stays small while the job runs

    threads = _threads()
    try:
        with ThreadPoolExecutor(threads) as pool:
            copied_per_us = _copy_rate(pool, threads, int(free_memory().free_bytes * _SHARE))
        ones = np.ones((_ROWS, _ROWS), dtype=np.float32)
        out = np.empty_like(ones)
        flops_per_us = 2 * _ROWS**3 / _fastest_us(lambda: np.matmul(ones, ones, out=out))
    except MemoryError:
        return Speed(how="not measured: no memory was free for it")
    count = f"{threads} thread{'s' if threads > 1 else ''}"
    return Speed(
        memory_bytes_per_us=2 * copied_per_us,
        to_host_bytes_per_us=copied_per_us,
        from_host_bytes_per_us=copied_per_us,
        fp32_flops_per_us=flops_per_us,
        threads=threads,
        how=f"measured with numpy on {count} after the job",
    )


def _copy_rate(pool: ThreadPoolExecutor, threads: int, free_bytes: int) -> float:
    """Returns the copy rate in bytes per microsecond; 0 if too little memory is free. Numpy copies without the GIL."""
    import numpy as np

    size = min(_COPY_BYTES, free_bytes // 2) // 4 // threads * threads
    if size * 4 < _LEAST_COPY_BYTES:
        return 0.0
    source, target = np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.float32)
    source.fill(1)  # zero pages are not backed by memory until written
    parts = list(zip(np.split(target, threads), np.split(source, threads), strict=True))
    return source.nbytes / _fastest_us(lambda: list(pool.map(_copy, parts)))


def _copy(part: tuple[Floats32, Floats32]) -> None:
    target, source = part
    target[:] = source


def _fastest_us(run: Callable[[], object]) -> float:
    """Runs a function repeatedly, at least once after a warm-up; returns the fastest time in microseconds."""
    run()
    fastest, end = float("inf"), time.perf_counter() + _SECONDS
    while True:
        begin = time.perf_counter_ns()
        run()
        fastest = min(fastest, (time.perf_counter_ns() - begin) / 1e3)
        if time.perf_counter() >= end:
            return max(fastest, 1e-3)


def _threads() -> int:
    """Returns the default thread count of numpy and torch: what the job could have used."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(available, int(wanted)) if wanted.isdecimal() and int(wanted) > 0 else available
