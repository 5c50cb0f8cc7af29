"""The host memory of a job's processes: its parts, its limits, and what grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memprof.analysis.host.host_use import HostUse
from memprof.analysis.leaks.held import describe_copies
from memprof.analysis.leaks.leak import HeldBy, Leak
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, Holders, HostHeap, HostLimits, HostMemory
from memprof.trace.store import Trace
from tests.building import Tables

MIB = 2**20
GIB = 2**30


def samples(*processes: tuple[int, str, Callable[[float], int]], seconds: int = 60) -> HostMemory:
    """Samples of processes each second, with all memory their own: id, role, and bytes at a time in MiB."""
    rows = [(time, pid, role, size(time) * MIB) for time in range(seconds) for pid, role, size in processes]
    times, pids, roles, sizes = zip(*rows, strict=True)
    zeros = [0] * len(rows)
    return HostMemory.of(
        time_us=[1e6 * time for time in times],
        pid=pids,
        role=roles,
        rss_bytes=sizes,
        peak_rss_bytes=[NONE] * len(rows),
        private_bytes=sizes,
        heap_bytes=sizes,
        anonymous_bytes=sizes,
        shared_bytes=zeros,
        file_bytes=zeros,
        swapped_bytes=zeros,
    )


def heap(used: Sequence[int], free: Sequence[int], blocks: Sequence[int]) -> HostHeap:
    """Samples of the heaps of a process, each second, in MiB."""
    return HostHeap.of(
        time_us=np.arange(len(used)) * 1e6,
        used_bytes=np.asarray(used) * MIB,
        free_bytes=np.asarray(free) * MIB,
        python_blocks=blocks,
    )


def use(one: HostMemory, *, limits: HostLimits | None = None, heaps: dict[int, HostHeap] | None = None) -> HostUse:
    return HostUse(one, limits or HostLimits.empty(), heaps or {})


def test_parts_are_those_of_the_fullest_moment() -> None:
    """The parts are taken when the job used the most memory, and add up to it; mapped files are not included."""
    one = samples((1, "trainer", lambda t: 300 if t == 30 else 200), (2, "worker", lambda t: 90 if t == 30 else 100))
    one = one.replace(file_bytes=np.full(len(one), 7 * MIB), shared_bytes=np.full(len(one), 5 * MIB))
    found = use(one)
    assert {part.name: part.bytes // MIB for part in found.fullest} == {
        "trainer": 300,
        "worker": 90,
        "shared memory": 10,
        "mapped files": 14,
    }
    assert found.total_bytes == 400 * MIB


def test_parts_over_time_sum_to_the_fullest() -> None:
    """After each round of samples: each role's own while its processes live, and what is shared or mapped."""
    one = samples(
        (1, "trainer", lambda t: 100 + t), (2, "worker", lambda t: 50), (3, "worker", lambda t: 20), seconds=9
    )
    one = one.replace(file_bytes=np.where(one.pid == 1, 7 * MIB, 0), shared_bytes=np.where(one.pid == 3, 3 * MIB, 0))
    one = one.replace(rss_bytes=np.where((one.pid == 2) & (one.time_us == 6e6), 0, one.rss_bytes))
    found = use(one.take(((one.pid != 2) | (one.time_us <= 6e6)) & ((one.pid != 3) | (one.time_us >= 2e6))))
    assert found.times_us.tolist() == [1e6 * t for t in range(9)]
    assert {name: (sizes // MIB).tolist() for name, sizes in found.over_time.items()} == {
        "trainer": [100 + t for t in range(9)],
        "worker": [50, 50, 70, 70, 70, 70, 20, 20, 20],
        "shared memory": [0, 0, *[3] * 7],
        "mapped files": [7] * 9,
    }
    assert list(found.over_time) == ["trainer", "worker", "shared memory", "mapped files"]
    assert found.total_bytes == 178 * MIB


def test_workers_are_workers_from_their_first_sample_on() -> None:
    """A process found to be a worker after its first samples counts as one at the fullest moment, too."""
    both = samples((1, "trainer", lambda _: 200), (2, "worker", lambda _: 90), (3, "worker", lambda _: 80))
    early = both.replace(role=np.where((both.pid > 1) & (both.time_us < both.time_us.max()), "child", both.role))
    assert [part.name for part in use(early).fullest] == ["trainer", "2 workers (largest 90.00 MiB)"]
    children = both.replace(role=np.where(both.pid > 1, "child", both.role))
    assert [part.name for part in use(children).fullest] == ["trainer", "2 children (largest 90.00 MiB)"]


def test_ended_processes_count_no_longer() -> None:
    """A process that has ended is not added to those that come later."""
    one = samples((1, "trainer", lambda t: 100), (2, "worker", lambda t: 50), (3, "worker", lambda t: 50))
    one = one.take(((one.pid != 2) | (one.time_us <= 20e6)) & ((one.pid != 3) | (one.time_us > 30e6)))
    one = one.replace(rss_bytes=np.where((one.pid == 2) & (one.time_us == 20e6), 0, one.rss_bytes))
    assert use(one).total_bytes == 150 * MIB


def test_workers_have_the_role_that_is_found_later() -> None:
    """A process is a child until it is looked at again: its samples before are a worker's, too."""
    one = samples((1, "trainer", lambda t: 100), *((pid, "child", lambda t: 60 - t // 30) for pid in (2, 3)))
    assert use(one).fullest[1].name == "2 children (largest 60.00 MiB)"
    one = one.replace(role=np.where((one.pid > 1) & (one.time_us >= 40e6), "worker", one.role))
    assert use(one).fullest[1].name == "2 workers (largest 60.00 MiB)"


def test_a_peak_between_samples_counts() -> None:
    """Bytes that a trainer had between two samples, as the kernel's mark shows, are counted."""
    one = samples((1, "trainer", lambda t: 100))
    marks = np.where(one.time_us >= 40e6, 260 * MIB, 100 * MIB)
    found = use(one.replace(peak_rss_bytes=marks))
    assert found.total_bytes == 260 * MIB
    (said,) = found.warnings()
    assert said.startswith(
        "Host memory of the trainer rose to 260.00 MiB for a moment, 40 s after the start, from 100.00 MiB usually"
    )


def test_mapped_files_that_fill_are_no_memory_of_the_trainer() -> None:
    """Pages of mapped files that come between two divisions into kinds, and go again, are not the trainer's."""
    one = samples((1, "trainer", lambda t: 100 + 5 * t * (t < 55)))
    none = np.where(one.time_us % 10e6 > 0, NONE, 100 * MIB)
    zeros, fixed = np.zeros(len(one), dtype=np.int64), np.full(len(one), 100 * MIB)
    marks = np.where(one.time_us == 59e6, 372 * MIB, NONE)
    found = use(one.replace(heap_bytes=fixed, anonymous_bytes=none, file_bytes=zeros, peak_rss_bytes=marks))
    assert found.describe() == "102.00 MiB: trainer 102.00 MiB"
    assert list(found.warnings()) == []


@pytest.mark.parametrize(
    ("used", "free", "blocks", "cause"),
    [
        (2, 0, 0, "on the heap of the C library"),
        (0, 2, 0, "of it is freed memory that the C library keeps"),
        (0, 0, 20_000, "more Python objects"),
        (0, 0, 0, "outside the C library's heap"),
    ],
)
def test_growth_of_a_trainer_has_its_cause(used: int, free: int, blocks: int, cause: str) -> None:
    """The heap samples of a trainer show what kind of its memory grew."""
    steps = range(60)
    heaps = {1: heap([used * t for t in steps], [free * t for t in steps], [blocks * t for t in steps])}
    (said,) = use(samples((1, "trainer", lambda t: 100 + 2 * t)), heaps=heaps).warnings()
    assert said.startswith("Host memory of the trainer grows from ")
    assert "2.00 MiB a second: " in said
    assert cause in said


@pytest.mark.parametrize(
    ("counted_at", "share", "cause"),
    [
        ((10, 40), 0.9, "(tensors or numpy arrays that Python holds)"),
        ((20, 30, 50), 0.0, "(C code or a library: tensors and numpy arrays hardly grew)"),
        ((20, 50), 0.4, "(tensors, numpy arrays, or C code)"),  # some of each
        ((40,), 0.9, "(tensors, numpy arrays, or C code)"),  # counted once
        ((10, 59), 0.0, "(tensors, numpy arrays, or C code)"),  # at the end variables are gone
    ],
)
def test_growth_on_the_heap_is_told_by_counted_tensors(counted_at: tuple[int, ...], share: float, cause: str) -> None:
    """Where tensors and arrays were counted twice meanwhile, they are told from C code by what they grew."""
    sizes = heap([2 * t for t in range(60)], [0] * 60, [0] * 60)
    is_counted = np.isin(np.arange(60), counted_at)
    sizes = sizes.replace(held_bytes=np.where(is_counted, (share * sizes.used_bytes).astype(np.int64), NONE))
    (said,) = use(samples((1, "trainer", lambda t: 100 + 2 * t)), heaps={1: sizes}).warnings()
    assert said.endswith(f"on the heap of the C library {cause}.")


def test_growth_names_what_python_holds() -> None:
    """The variable that holds a good part of what grew is named; of a small part it is not, nor of C code."""
    heaps = {1: heap([2 * t for t in range(60)], [0] * 60, [0] * 60)}
    found, small = (use(samples((1, "trainer", lambda t: 100 + 2 * t)), heaps=heaps) for _ in range(2))
    held = HeldBy("global", "kept[3]", "list", "train.py:2", is_by_graph=False)
    leak = Leak(0, 90 * MIB, 9, 0, "unknown", "64x64", "numpy.float32", "", "", "", 1, held)
    found.kept = {1: [leak]}
    (said,) = found.warnings()
    assert said.endswith(
        "(tensors, numpy arrays, or C code), 90.00 MiB so far of 64x64 numpy.float32, held by `kept[3]` (list) in "
        "train.py:2."
    )
    small.kept = {1: [replace(leak, kept_bytes=MIB)]}
    assert "kept[3]" not in "".join(small.warnings())


def test_what_is_held_twice_is_told() -> None:
    """Two variables that hold tensors of the same shapes, which training does not keep, are named with their bytes."""
    chains = ["moved['a']", "moved['b']", "loaded['a']", "loaded['b']", "other"]
    rows = len(chains)
    holders = Holders.of(
        device=["cpu"] * rows, chain=chains, container=["dict"] * rows, shape=["8", "9", "8", "9", "7"],
        tensors=[0] * rows, total_bytes=[size * MIB for size in (16, 20, 16, 20, 90)],
        dtype=["float32"] * rows, step=[4] * rows,
    )  # fmt: skip
    trace = Trace.of([(Manifest(), {Holders: holders})], Path("run.memprof"))
    assert describe_copies(trace).startswith(
        "2 tensors of the same shapes (36.00 MiB) are in main memory twice, held by `moved` (dict) and by `loaded` "
    )
    fewer = holders.take(np.arange(rows) != 2).replace(total_bytes=np.full(rows - 1, 3 * MIB))
    assert describe_copies(Trace.of([(Manifest(), {Holders: fewer})], Path("run.memprof"))) == ""


def test_workers_that_grow_are_one_sentence() -> None:
    """Workers that grow alike are told together, each with its share."""
    grown = samples((1, "trainer", lambda t: 500), *((pid, "worker", lambda t: 20 + t) for pid in (2, 3)))
    said = next(use(grown).warnings())
    assert said.startswith("Host memory of 2 workers grows, each from ")
    assert "1.00 MiB a second." in said


@pytest.mark.parametrize(
    "size",
    [
        lambda t: 100,
        lambda t: 100 + 4 * min(t, 15),  # fills at the start
        lambda t: 100 + 50 * (t // 5 % 2),  # comes and goes
        lambda t: 100 + min(4 * t, 80) if t < 55 else 100,
        lambda t: 1000 + t // 10,  # a little
    ],
)
def test_sound_processes_do_not_grow(size: Callable[[float], int]) -> None:
    """Memory that fills up once, goes up and down, or rises slightly does not count as growth."""
    assert use(samples((1, "trainer", size))).growth == ()


def test_what_fills_once_is_no_growth_however_often_it_was_sampled() -> None:
    """A process is written more often while it changes: a cache that fills, and then stays, does not grow."""
    one = samples((1, "trainer", lambda t: 100 + 4 * min(t, 30)), seconds=120)
    assert use(one.take((one.time_us <= 30e6) | (one.time_us % 20e6 == 0))).growth == ()


def test_growth_is_no_moment() -> None:
    """Memory that grows fast at the end is not called held twice for a moment."""
    one = samples((1, "trainer", lambda t: 100 + 2 * t + max(0, t - 45) * 12))
    (said,) = use(one).warnings()
    assert "grows" in said


def test_workers_that_come_and_go_are_no_moment() -> None:
    """Workers of one epoch that ended before those of the next are not added to them."""
    one = samples(
        (1, "trainer", lambda t: 300), *((2 + epoch, "worker", lambda t: 200) for epoch in range(4)), seconds=40
    )
    epoch = one.time_us // 10e6
    alive = (one.pid == 1) | (one.pid == 2 + epoch)
    ended = (one.pid == 1 + epoch) & (one.time_us % 10e6 == 0) & (one.pid > 1)
    gone = np.where(ended, 0, one.rss_bytes)
    no_kinds = np.where((one.pid > 1) | (one.time_us % 40e6 > 0), NONE, one.anonymous_bytes)
    no_kinds = np.where((one.pid > 1) & (one.time_us % 10e6 == 1e6), one.anonymous_bytes, no_kinds)
    one = one.replace(rss_bytes=gone, heap_bytes=np.where(ended, NONE, one.heap_bytes), anonymous_bytes=no_kinds)
    found = use(one.take(alive | ended))
    assert found.total_bytes == 500 * MIB
    assert list(found.warnings()) == []


def test_growth_while_recording_does_not_count() -> None:
    """What grew until the last recorded step is not looked at: recording it takes memory, too."""
    one = samples((1, "trainer", lambda t: 100 + 3 * min(t, 50)))
    assert use(one).growth
    assert HostUse(one, HostLimits.empty(), {}, recorded_us=50e6).growth == ()


def test_workers_with_copies_of_their_own() -> None:
    """Workers that hold most of what the job has are named, with the least of each."""
    one = samples((1, "trainer", lambda t: 200), *((pid, "worker", lambda t: 100) for pid in range(2, 10)))
    one = one.replace(heap_bytes=one.heap_bytes + 150 * MIB)
    (said,) = use(one).warnings()
    assert said.startswith("8 workers hold 800.00 MiB, at least 100.00 MiB each, that no other process shares")


def test_workers_that_have_ended_are_not_summed() -> None:
    """Of workers that each epoch starts anew, only those at the fullest moment hold memory together."""
    one = samples((1, "trainer", lambda t: 100), *((pid, "worker", lambda t: 100) for pid in range(2, 10)))
    epoch = one.time_us // 15e6
    one = one.take((one.pid == 1) | (one.pid // 2 == 1 + epoch) | ((one.pid // 2 == epoch) & (one.time_us % 15e6 == 0)))
    ended = (one.pid > 1) & (one.pid // 2 == one.time_us // 15e6)
    one = one.replace(rss_bytes=np.where(ended, 0, one.rss_bytes), heap_bytes=one.heap_bytes + 150 * MIB)
    (said,) = use(one).warnings()
    assert said.startswith("2 workers hold 200.00 MiB")


def test_workers_by_spawn_import_torch_without_a_warning() -> None:
    """Workers that share nothing with the trainer have what they import, which are no copies of the data set."""
    one = samples((1, "trainer", lambda t: 200), *((pid, "worker", lambda t: 150) for pid in (2, 3)))
    assert list(use(one).warnings()) == []


def test_memory_freed_but_kept() -> None:
    """What the C library keeps at each end of a step is told; at the fullest moment, inside one, it may be in use."""
    heaps = {1: heap([100] * 60, [0] * 20 + [200] * 20 + [120] * 20, [0] * 60)}
    found = use(samples((1, "trainer", lambda t: 300)), heaps=heaps)
    assert {part.name: part.bytes // MIB for part in found.fullest} == {"trainer": 300}
    (said,) = found.warnings()
    assert said.startswith(
        "At the ends of steps, at least 120.00 MiB of host memory was free, but kept by the C library"
    )
    assert "MALLOC_ARENA_MAX=2" in said
    now_and_then = {1: heap([100] * 60, [120, 0] * 30, [0] * 60)}
    assert list(use(samples((1, "trainer", lambda t: 300)), heaps=now_and_then).warnings()) == []


def test_nodes_have_their_own_processes_and_limits() -> None:
    """Processes of two nodes may have the same ids; the fullest node is shown, and messages name theirs."""

    def rank(number: int, size: int, used: int) -> tuple[Manifest, Tables]:
        one = samples((7, "trainer", lambda t: size), seconds=4)
        limits = HostLimits.of(time_us=[1.0], name=["machine"], total_bytes=[10 * GIB], used_bytes=[used * GIB])
        return Manifest(rank=number, world_size=2, node=f"gpu-{number}", pid=7), {HostMemory: one, HostLimits: limits}

    found = HostUse.of(Trace.of([rank(0, 1000, 9), rank(1, 3000, 4)], Path("run.memprof")))
    assert found.describe() == "2.93 GiB of 10.00 GiB (machine) on gpu-1: trainer 2.93 GiB"
    assert [one.maximum_rss_bytes // MIB for one in found.processes] == [3000, 1000]
    (said,) = found.warnings()
    assert said.startswith("On gpu-0: The memory of the machine was nearly full, 9.00 GiB of 10.00 GiB in use")


def test_limits_at_their_closest() -> None:
    """The limit shown is the one of which least was left; one that was nearly used up is a warning."""
    limits = HostLimits.of(
        time_us=[1.0, 1.0, 1.0, 2.0, 2.0, 2.0],
        name=["control group", "machine", "/dev/shm"] * 2,
        total_bytes=[2 * GIB, 64 * GIB, 64 * MIB] * 2,
        used_bytes=[GIB, 30 * GIB, MIB, 19 * GIB // 10, 20 * GIB, 63 * MIB],
    )
    found = use(samples((1, "trainer", lambda t: 1000)), limits=limits)
    assert found.describe() == "1000.00 MiB of 2.00 GiB (control group): trainer 1000.00 MiB"
    group, shared = found.warnings()
    assert group == (
        "The memory of the control group was nearly full, 1.90 GiB of 2.00 GiB in use: once it is used up, the kernel "
        "kills the largest process."
    )
    assert shared.startswith("/dev/shm was nearly full, 63.00 MiB of 64.00 MiB in use: batches of loader workers")


def test_without_kinds_there_are_no_parts() -> None:
    """Where the system reports no kinds of memory, as for files of earlier versions, only maxima are told."""
    one = HostMemory.of(time_us=[1.0], pid=[1], role=["trainer"], rss_bytes=[5], private_bytes=[NONE])
    found = use(one)
    assert (found.fullest, found.describe(), list(found.warnings())) == ((), "", [])
    assert found.processes[0].maximum_rss_bytes == 5
