"""Measures how fast the recording machine is: memory, copies and matrix products, with numpy alone.

It runs in memprof's own process once the job has ended and its end is on disk: nothing of the job is alive any more
that it could slow down, take memory from, or whose random numbers it could draw. The job's own processes never
measure a CPU. (A CUDA device is measured in the job, at its very end: ``memprof.recorder.profiler.speed``.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import psutil

from memprof.trace.manifest import Speed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats32 = npt.NDArray[np.float32]

#: How long each of the two is measured. The fastest run counts: whatever else the machine does only makes it slower.
_SECONDS = 0.06
#: Bytes of each of the two arrays that are copied; more than the last cache of a processor's share of cores holds.
_COPY_BYTES = 64 * 2**20
#: Of the memory that is free, no more than this share is taken.
_SHARE = 1 / 16
#: With fewer bytes than these the cache is measured, not the memory.
_LEAST_COPY_BYTES = 8 * 2**20
#: Rows and columns of the matrices: large enough for the full rate, small enough for a slow core's time.
_ROWS = 512


def measure_speed() -> Speed:
    """Measures memory bandwidth and the rate of fp32 products, in about 0.2 seconds.

    Returns:
        The speeds; those that could not be measured for want of memory are 0.
    """
    import numpy as np  # the parent stays small while the job runs

    threads = _threads()
    try:
        with ThreadPoolExecutor(threads) as pool:
            copied_per_us = _copy_rate(pool, threads, int(psutil.virtual_memory().available * _SHARE))
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
    """Returns the bytes copied in a microsecond; 0 where too little memory is free. Numpy copies without the GIL."""
    import numpy as np

    size = min(_COPY_BYTES, free_bytes // 2) // 4 // threads * threads
    if size * 4 < _LEAST_COPY_BYTES:
        return 0.0
    source, target = np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.float32)
    source.fill(1)  # zeros have no pages of their own until they are written
    parts = list(zip(np.split(target, threads), np.split(source, threads), strict=True))
    return source.nbytes / _fastest_us(lambda: list(pool.map(_copy, parts)))


def _copy(part: tuple[Floats32, Floats32]) -> None:
    target, source = part
    target[:] = source


def _fastest_us(run: Callable[[], object]) -> float:
    """Runs something for a while, once at least after a first time; returns the fastest time in microseconds."""
    run()
    fastest, end = float("inf"), time.perf_counter() + _SECONDS
    while True:
        begin = time.perf_counter_ns()
        run()
        fastest = min(fastest, (time.perf_counter_ns() - begin) / 1e3)
        if time.perf_counter() >= end:
            return max(fastest, 1e-3)


def _threads() -> int:
    """Returns how many threads numpy and torch take unless they are told otherwise: what the job could have had."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return min(available, int(wanted)) if wanted.isdecimal() and int(wanted) > 0 else available
