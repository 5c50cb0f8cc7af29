"""The pinned memory that copies of a plan take is known beforehand, and bounded where asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from memprof.analysis.plans.basis import Basis
from memprof.errors import UsageError
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest
from memprof.policies.allocator.policy import Allocator
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.swap.policy import Swap
from memprof.policies.swap.transfers import DiskCarrier
from memprof.policies.swap.transform import host_bytes
from memprof.replay.live import live_bytes
from memprof.replay.rounding import pinned_peak, rounded_when_pinned
from tests.building import Op, Storage, make_step
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


def test_options_limit_what_is_rounded_and_what_is_kept() -> None:
    """2.25 GiB take 4, or 2.25 above either limit; what is above the cache's limit is returned when it is freed."""
    large = np.array([9 << 28, 3 << 20])
    for option in ("round_threshold", "cached_size"):
        exact = rounded_when_pinned(large, f"expandable_segments:True,pinned_max_{option}_mb:64")
        assert exact.tolist() == [9 << 28, 4 << 20]
    sizes, first, last = np.array([300, 400, 500]) << 20, np.array([0, 5, 10]), np.array([4, 9, 14])
    assert pinned_peak(sizes, first, last) == 512 << 20
    assert pinned_peak(sizes, first, last, "pinned_max_cached_size_mb:64") == 500 << 20
    at_once = pinned_peak(sizes, first, np.array([5, 9, 14]), "pinned_max_cached_size_mb:64")
    assert at_once == 700 << 20
    # Kept without rounding, the same block serves all three: at most the largest of them is held.
    assert pinned_peak(sizes, first, last, "pinned_max_round_threshold_mb:64") == 500 << 20


def test_a_plan_that_pins_much_names_the_option_that_cures_rounding() -> None:
    """State of 2.25 GiB pins 4 GiB; under the option, of the plan or of the job, 2.25 GiB, and nothing is said."""
    step = make_step(
        [Op(reads=["w", "m"], phase="optimizer")],
        [
            Storage("w", 9 << 28, category="parameter", name="w", shape="603979776"),
            Storage("m", 9 << 28, category="optimizer_state", name="w.exp_avg", shape="603979776"),
        ],
    )
    plan = Plan((OptimizerPolicy(state="host"),))
    assert Basis(step).host_bytes_under(plan) == 4 << 30
    assert Basis(step).describe_rounding(plan) == (
        "the plan pins 4.00 GiB on the host, as torch rounds each copy up to a power of two; with torch 2.13 or newer, "
        "--allocator pinned_max_cached_size_mb:2048 makes it 2.25 GiB, but larger copies are "
        "then pinned anew each time."
    )
    option = Allocator(pinned_max_cached_size_mb=2048)
    cured = plan.with_policies((option,)), replace(step, allocator_settings="pinned_max_cached_size_mb:2048")
    assert Basis(step).host_bytes_under(cured[0]) == Basis(cured[1]).host_bytes_under(plan) == 9 << 28
    assert not Basis(step).describe_rounding(cured[0])
    assert not Basis(cured[1]).describe_rounding(plan)


def test_blocks_that_are_kept_without_rounding_come_with_a_warning() -> None:
    """torch 2.13 compares powers of two alone (CachingHostAllocator.h, get_free_block): a block may be too small."""
    assert "pinned_max_cached_size_mb:64" in Allocator(pinned_max_round_threshold_mb=64).caveat
    assert not Allocator(pinned_max_round_threshold_mb=64, pinned_max_cached_size_mb=64).caveat
    assert not Allocator(pinned_max_cached_size_mb=64).caveat


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
