"""Arrangements of recorded jobs: one device as recorded, the search against trying everything, and stage balance."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from memprof.errors import PolicyError
from memprof.planners.arrangement.arrangement import CHECKPOINTED, OFFLOADED, SCHEDULES, Arrangement, Cluster
from memprof.planners.arrangement.balance import split_by_count, split_by_peak, split_by_time
from memprof.planners.arrangement.layer_costs import LayerCosts, scale_costs
from memprof.planners.arrangement.rank_time import least_step_us
from memprof.planners.arrangement.read_layers import read_layers
from memprof.planners.arrangement.search import Question, arrange, find_arrangements, kind_of
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.shard.policy import Shard
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace

SAMPLES = Path(__file__).parents[3] / "sample_traces"
#: How far a modelled peak may be off that of the replay, which is measured to the byte (docs/sharding.md).
OFF = 0.09


@cache
def step_of(name: str) -> Step:
    return Trace.open(SAMPLES / name / "run.memprof").fullest_step(is_whole=True)


@cache
def costs_of(name: str) -> LayerCosts:
    return read_layers(step_of(name))


def question(name: str, devices: int, budget_bytes: int = 0, samples: int | None = None) -> Question:
    costs = costs_of(name)
    cluster = Cluster(devices, 4, 25e3, 5e3, 12e3)
    return Question(costs, cluster, budget_bytes, samples or costs.samples * devices)


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_one_device_is_as_recorded(name: str) -> None:
    alone = arrange(question(name, 1), Arrangement(samples=costs_of(name).samples))
    assert alone.peak_bytes == live_bytes(step_of(name)).during.max()
    assert alone.times.step_us == pytest.approx(step_of(name).duration_us)


@pytest.mark.parametrize(
    ("name", "ranks", "zero", "rounds", "checkpointed"),
    [
        (name, ranks, zero, rounds, checkpointed)
        for name, ranks, zero, rounds, checkpointed in itertools.product(
            ("gpt", "resnet"), (1, 2, 8), range(4), (1, 2), ("none", "all")
        )
        if ranks > 1 or zero == 0
    ],
)
def test_data_parallel_ranks_are_near_their_replay(
    name: str, ranks: int, zero: int, rounds: int, checkpointed: str
) -> None:
    costs = costs_of(name)
    policies: list[Policy] = [Shard(zero, ranks)] if ranks > 1 else []
    policies += [Accumulate(rounds)] if rounds > 1 else []
    policies += [Checkpoint(costs.names[1:-1])] if checkpointed == "all" else []
    replayed = Plan(tuple(policies)).transform(step_of(name))
    arrangement = Arrangement(ranks, zero=zero, micro_batches=rounds, samples=costs.samples // rounds)
    found = arrange(question(name, ranks), replace(arrangement, checkpointed=checkpointed))
    assert found.peak_bytes == pytest.approx(int(live_bytes(replayed).during.max()), rel=OFF)
    assert found.times.step_us == pytest.approx(replayed.duration_us, rel=OFF)


def everything(asked: Question) -> list[Arrangement]:
    """Every arrangement over the devices, each field's values combined with all others'."""
    costs, devices = asked.costs, asked.cluster.devices
    found = []
    splits: dict[tuple[object, ...], tuple[tuple[int, ...], ...]] = {}
    numbers = [each for each in range(1, devices + 1) if devices % each == 0]
    for data, tensor, pipeline, context in itertools.product(numbers, repeat=4):
        if data * tensor * pipeline * context != devices or asked.samples % data or tensor > asked.cluster.per_node:
            continue
        own = asked.samples // data
        for samples, zero, schedule, kept, moved in itertools.product(
            range(1, own + 1), range(4), ("", *SCHEDULES), CHECKPOINTED, OFFLOADED
        ):
            rounds = own // samples
            if own % samples or rounds > 256 or (schedule == "") != (pipeline == 1) or (pipeline > 1 and rounds == 1):
                continue
            if (data * context == 1 and zero) or (moved == "activations" and kept != "none"):
                continue
            one = Arrangement(data, tensor, pipeline, context, 1, zero, rounds, samples, schedule, kept, moved)
            if one.chunks > 1 and (rounds % pipeline or costs.layers < one.chunks * pipeline):
                continue
            if pipeline > costs.layers:
                continue
            scaled = scale_costs(costs, one, asked.cluster)
            if pipeline == 1:
                found.append(one)
                continue
            split = split_by_time(scaled.forward_us + scaled.backward_us, pipeline * one.chunks)
            found.append(replace(one, split=split))
            if one.chunks == 1:
                key = (tensor, context, pipeline, zero, rounds, samples, schedule, kept, moved)
                splits.setdefault(key, (split_by_peak(costs, scaled, replace(one, split=split)),))
                found += [replace(one, split=each) for each in splits[key]]
    return found


@pytest.mark.parametrize(("devices", "share"), [(2, 0.15), (4, 0.15), (4, 0.08)])
def test_the_search_finds_what_trying_everything_finds(devices: int, share: float) -> None:
    budget = int(live_bytes(step_of("gpt")).during.max() * share)
    asked = question("gpt", devices, budget, samples=8)
    tried = [arrange(asked, each) for each in everything(asked)]
    fitting = [each for each in tried if each.peak_bytes <= budget]
    found = find_arrangements(asked)
    assert 0 < len(fitting) < len(tried)
    best: dict[tuple[object, ...], float] = {}
    for each in fitting:
        kind = kind_of(each.arrangement)
        best[kind] = min(best.get(kind, float("inf")), each.times.step_us)
    assert {kind_of(each.arrangement): each.times.step_us for each in found.fitting} == pytest.approx(best)


def test_nothing_fits_a_tiny_budget() -> None:
    found = find_arrangements(question("gpt", 4, 1000, samples=8))
    assert not found.fitting
    assert found.nearest is not None
    assert found.nearest.peak_bytes == max(stage.peak_bytes for stage in found.nearest.stages) > 1000


def test_no_schedule_is_faster_than_its_bound() -> None:
    asked = question("gpt", 4, samples=16)
    for pipeline, schedule, rounds, zero in itertools.product((2, 4), SCHEDULES, (4, 8), (0, 2, 3)):
        one = Arrangement(4 // pipeline, 1, pipeline, 1, 1, zero if pipeline < 4 else 0, rounds, 1, schedule)
        if pipeline * one.chunks > asked.costs.layers:
            continue
        one = replace(one, split=split_by_count(len(asked.costs.names), pipeline * one.chunks))
        scaled = scale_costs(asked.costs, one, asked.cluster)
        bound = least_step_us(asked.costs, scaled, one, asked.cluster)
        assert bound <= arrange(asked, one).times.step_us * (1 + 1e-9)


def splits_of(units: int, stages: int) -> list[tuple[int, ...]]:
    """Every split of units into stages with a layer each."""
    cuts = itertools.combinations(range(2, units - 1), stages - 1)
    return [tuple(end - start for start, end in itertools.pairwise((0, *each, units))) for each in cuts]


@pytest.mark.parametrize(("name", "stages"), [("gpt", 2), ("gpt", 3), ("resnet", 2), ("resnet", 3), ("resnet", 4)])
@pytest.mark.parametrize("checkpointed", ["none", "all"])
def test_the_levelled_split_has_the_lowest_of_all_peaks(name: str, stages: int, checkpointed: str) -> None:
    asked = question(name, stages, samples=16)
    one = Arrangement(pipeline=stages, micro_batches=16, samples=1, schedule="1F1B", checkpointed=checkpointed)
    scaled = scale_costs(asked.costs, one, asked.cluster)
    levelled = arrange(asked, replace(one, split=split_by_peak(asked.costs, scaled, one))).peak_bytes
    peaks = [arrange(asked, replace(one, split=each)).peak_bytes for each in splits_of(len(asked.costs.names), stages)]
    assert levelled == pytest.approx(min(peaks), rel=2e-3)
    assert levelled <= arrange(asked, replace(one, split=split_by_count(len(asked.costs.names), stages))).peak_bytes


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_split_by_time_has_the_fastest_slowest_stage(stages: int) -> None:
    costs = costs_of("resnet")
    times = costs.forward_us + costs.backward_us

    def slowest(split: tuple[int, ...]) -> float:
        ends = [0, *itertools.accumulate(split)]
        return max(float(times[start:end].sum()) for start, end in itertools.pairwise(ends))

    best = min(slowest(each) for each in splits_of(len(costs.names), stages))
    assert slowest(split_by_time(times, stages)) == pytest.approx(best, rel=2e-3)


def test_dividing_divides() -> None:
    asked = question("gpt", 8, samples=16)
    whole = arrange(asked, Arrangement(samples=16, micro_batches=1))
    for ways in ({"tensor": 2}, {"context": 2}):
        half = arrange(asked, Arrangement(samples=16, micro_batches=1, **ways))
        assert half.peak_bytes < whole.peak_bytes
        assert half.times.compute_us == pytest.approx(whole.times.compute_us / 2, rel=0.1)
        assert half.times.communication_us > 0


def test_a_recording_of_many_ranks_is_refused() -> None:
    step = step_of("gpt")
    ring = Shard(0, 2).transform(step)
    with pytest.raises(PolicyError, match="communicates with other ranks already"):
        read_layers(ring)
    with pytest.raises(PolicyError, match="accumulates several micro-batches"):
        read_layers(replace(step, ops=step.ops.replace(micro_batch=step.ops.op_id % 2)))
