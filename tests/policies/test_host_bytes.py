"""The pinned memory that copies of a plan take is known beforehand, and bounded where asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from memprof.errors import UsageError
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.swap.host_bytes import host_bytes
from memprof.policies.swap.policy import Swap
from memprof.policies.swap.transfers import DiskCarrier
from memprof.replay.live import live_bytes
from memprof.replay.rounding import pinned_peak, rounded_when_pinned
from tests.policies.faces import recorded, train
from tests.recorder.recorded import record

JOBS = Path(__file__).resolve().parents[2] / "lab" / "benchmarks" / "jobs"


def test_pinned_memory_comes_in_powers_of_two() -> None:
    """A byte more than a power of two takes the next."""
    sizes = np.array([0, 1, 2, 3, 4096, 4097, (1 << 40) + 1])
    assert rounded_when_pinned(sizes).tolist() == [0, 1, 2, 4, 4096, 8192, 1 << 41]


def test_freed_pinned_memory_serves_the_same_power_of_two() -> None:
    """Two copies one after the other share memory if they round to the same size, and only then."""
    first, last = np.array([0, 5]), np.array([4, 9])
    assert pinned_peak(np.array([3000, 4000]), first, last) == 4096
    assert pinned_peak(np.array([3000, 5000]), first, last) == 4096 + 8192
    assert pinned_peak(np.array([3000, 4000]), first, np.array([5, 9])) == 2 * 4096


@pytest.mark.parametrize(("name", "pattern"), [("gpt", "layers.*"), ("resnet", "stages.*"), ("unet", "down.*")])
@pytest.mark.parametrize("what", ["activations", "optimizer", "parameters"])
def test_copies_take_what_is_predicted(name: str, pattern: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies made elsewhere and dropped again, counted while the job trains."""
    alive: dict[int, int] = {}
    most: dict[int, int] = {}
    send, forget = DiskCarrier.send, DiskCarrier.forget

    def count(size_bytes: int, change: int) -> None:
        power = int(rounded_when_pinned(np.array([size_bytes]))[0])
        alive[power] = alive.get(power, 0) + change
        most[power] = max(most.get(power, 0), alive[power])

    def counted_send(self: DiskCarrier, storage):  # type: ignore[no-untyped-def]
        count(storage.nbytes(), 1)
        return send(self, storage)

    def counted_forget(self: DiskCarrier, place, storage) -> None:  # type: ignore[no-untyped-def]
        count(place.size_bytes, -1)
        forget(self, place, storage)

    monkeypatch.setattr(DiskCarrier, "send", counted_send)
    monkeypatch.setattr(DiskCarrier, "forget", counted_forget)
    modules = {"activations": (pattern,), "optimizer": (".",), "parameters": ("**",)}[what]
    policy = Swap(modules=modules, what=what, to="disk", minimum_bytes=1 << 12)
    train(name, Plan((policy,)), steps=2)
    assert sum(power * number for power, number in most.items()) == host_bytes(recorded(name), policy)


def test_optimizer_state_on_the_host_takes_two_copies_of_the_parameters() -> None:
    """Adam's two averages, each as large as its parameter."""
    step = recorded("gpt")
    sizes = step.storages.requested_bytes[step.storages.category == "parameter"]
    policy = OptimizerPolicy(state="host")
    assert policy.host_bytes(step) == 2 * rounded_when_pinned(sizes).sum()
    assert OptimizerPolicy(in_backward=True).host_bytes(step) == 0


def test_a_search_keeps_to_the_budget_of_the_host(tmp_path: Path) -> None:
    """On a card: swap alone takes what it needs, beside checkpoint what there is, and nothing without room."""
    script, small = JOBS / "searched.py", ("gpt", "--device", "cuda")
    step = record(tmp_path, "--dry-run", "--device", "rtx4090", script, *small).trace.fullest_step()
    budget = int(live_bytes(step).during.max()) * 9 // 10
    alone = explore(step, SearchRequest(budget, allow=("swap",), most_host_bytes=1 << 40)).best
    assert alone is not None
    assert alone.host_bytes > 0
    assert explore(step, SearchRequest(budget, allow=("swap",), most_host_bytes=alone.host_bytes // 4)).best is None
    for limit in (alone.host_bytes // 4, 0):
        best = explore(step, SearchRequest(budget, allow=("checkpoint", "swap"), most_host_bytes=limit)).best
        assert best is not None
        assert best.host_bytes <= limit
        assert limit or not any(isinstance(policy, Swap) for policy in best.policies)


def test_a_job_in_host_memory_has_no_budget_beside_it() -> None:
    """Its copies go to disk."""
    step = recorded("gpt")
    with pytest.raises(UsageError, match="ran there itself"):
        explore(step, SearchRequest(1 << 20, most_host_bytes=1 << 20))
