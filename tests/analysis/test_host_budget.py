"""What a job takes of host memory counts in budgets, and dry runs say how much it will be."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from memprof.analysis.host.host_forecast import HostForecast, Loader, describe_fewer_workers, describe_smaller_prefetch
from memprof.analysis.host.host_use import HostUse
from memprof.analysis.plans.host_budget import describe_host, with_host
from memprof.errors import UsageError
from memprof.machines.budget import HostBudget
from memprof.machines.catalogue import find_machine
from memprof.planners.search.request import SearchRequest
from memprof.recorder.steps.loaders import data_sizes
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.manifest import Backend, Machine, Manifest
from memprof.trace.schema import HostLimits, HostMemory, HostNeeds, Stacks, Table
from memprof.trace.store import Trace

MIB, GIB = 1 << 20, 1 << 30


def trace(device_name: str = "NVIDIA H100 80GB HBM3", backend: str = "cuda-native") -> Trace:
    """Returns a job that takes 6 GiB, of which two workers have 2 GiB each, on a host with 8 of 10 GiB in use."""
    samples = HostMemory.of(
        time_us=[1.0] * 3,
        pid=[1, 2, 3],
        role=["trainer", "worker", "worker"],
        rss_bytes=[2 * GIB] * 3,
        private_bytes=[2 * GIB] * 3,
        heap_bytes=[2 * GIB] * 3,
        anonymous_bytes=[2 * GIB] * 3,
    )
    limits = HostLimits.of(time_us=[1.0], name=["machine"], total_bytes=[10 * GIB], used_bytes=[8 * GIB])
    sizes = [2 * GIB, GIB, 100 * MIB, 3 * MIB]
    needs = HostNeeds.of(
        kind=["forked", "objects", "batch", "pinned"],
        stack_id=[0, 0, 0, 1],
        loader=[0, 0, 0, -1],
        count=[2, 1, 1, 2],
        batches=[0, 0, 6, 0],
        requested_bytes=sizes,
        size_bytes=[*sizes[:3], 4 * MIB],
    )
    frames = ["/job/train.py:9:<module>", "/job/train.py:4:<module>"]
    stacks = Stacks.of(stack_id=[0, 1], frames=frames, fx_nodes=["", ""])
    tables: dict[type[Table], Table] = {HostMemory: samples, HostLimits: limits, HostNeeds: needs, Stacks: stacks}
    machine = Machine(device_kind="cuda", device_name=device_name)
    return Trace.of([(Manifest(machine=machine, backend=Backend(name=backend)), tables)], Path("run.memprof"))


def test_a_plans_copies_get_what_the_job_leaves_of_the_host() -> None:
    """By default what was free when least was; of a budget what the job does not take; any on another host."""
    request = SearchRequest(GIB)
    found = with_host(request, trace(), None, targets_device=True)
    assert found.most_host_bytes == 2 * GIB
    given = replace(request, host=HostBudget(7 * GIB, 3 * GIB), most_host_bytes=3 * GIB)
    assert with_host(given, trace(), None, targets_device=True).most_host_bytes == GIB
    assert with_host(request, trace(), find_machine("a100-80gb"), targets_device=True) is request


def test_a_job_that_would_be_killed_itself_leaves_nothing() -> None:
    """No plan fits then, and the sentence says where to set fewer workers, and how many."""
    found = with_host(SearchRequest(GIB, host=HostBudget(5 * GIB)), trace(), None, targets_device=True)
    assert found.most_host_bytes == -GIB
    said = list(describe_host(found, trace()))
    assert said[0].endswith("1.00 GiB more than host=5.00 GiB: it would be killed.")
    assert said[1].startswith("In the DataLoader at train.py:9, num_workers=1 instead of 2 frees 2.")


def test_where_memory_is_unified_the_job_counts_against_the_one_budget() -> None:
    """On a device that has the host's memory, and where the budget says so."""
    found = with_host(SearchRequest(10 * GIB), trace("NVIDIA GB10"), None, targets_device=True)
    assert (found.is_unified, found.budget_bytes) == (True, 4 * GIB)
    with pytest.raises(UsageError, match="one size"):
        with_host(SearchRequest(GIB, host=HostBudget(GIB)), trace("NVIDIA GB10"), None, targets_device=True)
    with pytest.raises(UsageError, match=r"6\.00 GiB of host memory"):
        with_host(SearchRequest(GIB, is_unified=True), trace(), None, targets_device=True)


def test_a_dry_run_forecasts_the_host_as_intervals() -> None:
    """Workers up to copies of all Python objects, batches up to those in flight, pinned memory to the byte."""
    one = trace(backend=DRY_RUN)
    forecast = HostForecast.of(one, HostUse.of(one))
    assert forecast is not None
    parts = {part.name: (part.least_bytes, part.most_bytes) for part in forecast.parts}
    assert parts["pinned (train.py:4)"] == (8 * MIB, 8 * MIB)
    assert parts["shared batches (train.py:9)"] == (200 * MIB, 600 * MIB)
    least, most = parts["2 workers (train.py:9)"]
    assert least < 4 * GIB < most == 2 * (3 * GIB + 200 * MIB)
    assert forecast.margin_bytes is not None
    assert forecast.margin_bytes < 0
    assert "In the DataLoader at train.py:9, num_workers=" in next(forecast.warnings())


def test_advice_names_numbers_that_fit() -> None:
    """Fewer batches in flight where shared memory is short; fewer workers where even one each is too much."""
    one = Loader("train.py:9", workers=4, in_flight=18, batch_bytes=MIB, worker_bytes=64 * MIB)
    assert "prefetch_factor=2 instead of 4" in describe_smaller_prefetch([one], 12 * MIB)
    assert "num_workers=1 instead of 4" in describe_smaller_prefetch([one], 3 * MIB)
    assert "num_workers=0, or smaller" in describe_smaller_prefetch([one], MIB)
    assert "num_workers=2 instead of 4" in describe_fewer_workers([one], 130 * MIB)


def test_a_data_set_is_divided_into_objects_and_arrays(tmp_path: Path) -> None:
    """Numbers in lists are objects; what views of one array show counts once; mapped files are apart."""
    import numpy as np

    numbers = data_sizes([[float(number) for number in range(50_000)]])
    assert numbers["objects"] == pytest.approx(50_000 * 32, rel=0.01)
    assert numbers["arrays"] == pytest.approx(50_000 * 8, rel=0.2)
    array = np.zeros((1000, 1000))
    assert data_sizes([list(array)])["arrays"] == pytest.approx(array.nbytes, rel=0.01)
    np.save(tmp_path / "data.npy", array)
    assert data_sizes([np.load(tmp_path / "data.npy", mmap_mode="r")])["mapped"] == array.nbytes
    gone = weakref.proxy(lambda: None)  # of which isinstance would raise a ReferenceError
    assert set(data_sizes([gone])) == {"objects"}
