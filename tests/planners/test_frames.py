"""The settings that a search tries of each policy, and the errors measured in runs that it uses."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from memprof.errors import PolicyError
from memprof.planners.search.candidate import SeenErrors, kinds_of
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest
from memprof.policies import registry
from memprof.policies.accumulate import candidates as accumulate
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Candidates, Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compress.policy import Compress
from memprof.policies.precision.policy import Precision
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.policies.faces import recorded


@pytest.mark.parametrize(("size", "counts"), [(4, [2, 4]), (5, [2, 4]), (64, [2, 4, 8, 16]), (None, [2, 4, 8, 16])])
def test_no_more_micro_batches_than_samples(size, counts, monkeypatch):
    """A batch is divided into at most as many parts as it has samples; all counts are tried if that is unknown."""

    def find_batch(step: object) -> SimpleNamespace:
        if size is None:
            raise PolicyError("unknown")
        return SimpleNamespace(size=size)

    monkeypatch.setattr(accumulate, "find_batch", find_batch)
    for question in ("compares_samples", "repeats_by_batch"):
        monkeypatch.setattr(accumulate, question, lambda step: False)
    stacks = SimpleNamespace(frames=["torch/utils/data/dataloader.py:1 __next__"])
    step = SimpleNamespace(stacks=stacks, undivided="", usages=frozenset())
    assert [policy.micro_batches for policy in accumulate.candidates(step, 1).whole_step] == counts


@dataclasses.dataclass(frozen=True)
class Shrink(Policy):
    """A policy of another package: activations take half of their bytes."""

    name = "shrink"
    flag_help = "halve activations"
    tried_by_default = True

    @classmethod
    def from_flag(cls, text: str) -> Shrink:
        return cls()

    @classmethod
    def candidates(cls, step: Step, *, world_size: int = 1) -> Candidates:
        return Candidates((cls(),))

    def transform(self, step: Step) -> Step:
        storages = step.storages
        halved = np.where(storages.category == "activation", storages.allocated_bytes // 2, storages.allocated_bytes)
        return dataclasses.replace(step, storages=storages.replace(allocated_bytes=halved))

    def describe(self) -> str:
        return "shrink"


@pytest.fixture(scope="module")
def step() -> Step:
    return Trace.open("sample_traces/resnet/run.memprof").fullest_step()


@pytest.mark.parametrize("allow", [(), ("shrink",), ("shrink", "checkpoint")])
def test_a_policy_in_the_registry_is_tried(step: Step, allow: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry in the registry suffices for a search to try a policy alone and with others."""
    original = registry.policy_types
    listed = (*original(), Shrink)
    for module in [module for module in sys.modules.values() if getattr(module, "policy_types", None) is original]:
        monkeypatch.setattr(module, "policy_types", lambda: listed)
    registry.default_policies.cache_clear()
    peak = int(live_bytes(step).during.max())
    try:
        found = explore(step, SearchRequest(int(0.6 * peak), allow=allow, time_limit_s=20))
    finally:
        registry.default_policies.cache_clear()
    tried = {tuple(policy.name for policy in one.policies) for one in (*found.fitting, *found.others)}
    assert ("shrink",) in tried
    assert allow == ("shrink",) or any("shrink" in names and len(names) > 1 for names in tried)


def test_compress_is_tried_where_it_is_allowed(step: Step) -> None:
    """It chooses modules as checkpoint does; before, `--allow compress` was accepted and nothing was tried."""
    peak = int(live_bytes(step).during.max())
    found = explore(step, SearchRequest(int(0.8 * peak), allow=("compress",), time_limit_s=20))
    assert any(isinstance(policy, Compress) for one in (*found.fitting, *found.others) for policy in one.policies)


BF16, BLOCKS, STATE = Precision("bf16"), Checkpoint(("layers.0",)), Swap(what="optimizer", to="disk")


def test_an_error_is_expected_of_every_plan_that_has_the_policies() -> None:
    """Of other modules and other numbers too, and of no plan that lacks one of them."""
    known = SeenErrors().with_error([BF16], 10).with_error([BF16, BLOCKS], 30).with_error([BF16], 8)
    assert known.expected([BF16]) == 10
    assert known.expected([BF16, STATE]) == 10
    assert known.expected([BF16, Checkpoint(("layers.1",)), STATE]) == 30
    assert known.expected([BLOCKS, STATE]) == 0
    assert kinds_of([Accumulate(2)]) == kinds_of([Accumulate(4)])


def test_a_search_leaves_room_where_the_error_was_seen_and_nowhere_else() -> None:
    """At a budget that bf16 just meets it is not found any more once it took more; what swaps is found as before."""
    step = recorded("shared")
    search_request = SearchRequest(10**12, allow=("precision", "swap"), time_limit_s=60, is_checked=True)
    peak = explore(step, dataclasses.replace(search_request, budget_bytes=1)).recorded.peak_bytes
    search_request = dataclasses.replace(search_request, budget_bytes=int(0.75 * peak))
    before = explore(step, search_request)
    bf16 = next(one for one in before.fitting if any(isinstance(policy, Precision) for policy in one.policies))
    after = explore(
        step, dataclasses.replace(search_request, learned=SeenErrors().with_error([BF16], search_request.budget_bytes))
    )
    assert bf16.policies in {one.policies for one in before.fitting}
    assert not any(isinstance(policy, Precision) for one in after.fitting for policy in one.policies)
    swaps = explore(step, dataclasses.replace(search_request, forbid=("precision",)))
    assert {one.policies for one in swaps.fitting} & {one.policies for one in after.fitting}
