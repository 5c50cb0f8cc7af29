"""Searches for the fastest arrangements of a job over a number of devices that fit each of them."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from memprof.planners.arrangement.arrangement import CHECKPOINTED, CHUNKS, OFFLOADED, SCHEDULES, Arrangement, Cluster
from memprof.planners.arrangement.balance import split_by_peak, split_by_time
from memprof.planners.arrangement.layer_costs import LayerCosts, ScaledCosts, scale_costs
from memprof.planners.arrangement.pipeline import StagePeak, stage_peaks
from memprof.planners.arrangement.rank_time import StepTimes, least_step_us, step_times

#: Most micro-batches of an update that are tried; a pipeline's bubble is small long before.
_MOST_MICRO_BATCHES = 256


@dataclass(frozen=True)
class Arranged:
    """An arrangement with its memory and time.

    Attributes:
        arrangement: The arrangement.
        stages: Memory of the ranks of each stage.
        times: Its step time, by cause.
        samples: Samples of an update.
    """

    arrangement: Arrangement
    stages: tuple[StagePeak, ...]
    times: StepTimes
    samples: int

    @property
    def peak_bytes(self) -> int:
        """The worst rank's peak."""
        return max(stage.peak_bytes for stage in self.stages)

    @property
    def samples_per_second(self) -> float:
        """Samples per second over all devices."""
        return self.samples / self.times.step_us * 1e6 if self.times.step_us > 0 else 0.0


@dataclass(frozen=True)
class ArrangementSearch:
    """What was found.

    Attributes:
        fitting: The fastest that fit, the fastest of each combination of dimensions and ZeRO stage, fastest first.
        nearest: Where none fits, the one with the lowest peak.
        tried: Number of arrangements whose memory was computed.
        was_stopped: Whether time ran out before all were tried.
    """

    fitting: tuple[Arranged, ...]
    nearest: Arranged | None
    tried: int
    was_stopped: bool = False


@dataclass(frozen=True)
class Question:
    """What is searched for.

    Attributes:
        costs: The recorded costs of each layer.
        cluster: The devices.
        budget_bytes: Memory of each.
        samples: Samples of an update over all devices.
        deadline: ``time.monotonic`` value after which nothing new is tried.
        fixed: Fields of the arrangement that are given, with their values.
    """

    costs: LayerCosts
    cluster: Cluster
    budget_bytes: int
    samples: int
    deadline: float = float("inf")
    fixed: tuple[tuple[str, int], ...] = ()


def find_arrangements(question: Question) -> ArrangementSearch:
    """Finds the fastest arrangement that fits, and the fastest of each other kind.

    Among arrangements that differ only in what is checkpointed, those that keep more are faster, so the first that fits
    is the fastest; schedules are run only where their lower bound is below the best time of their kind.
    """
    tried, order = 0, itertools.count()
    waiting: list[tuple[float, int, Arrangement]] = []
    nearest: tuple[int, Arrangement] | None = None
    was_stopped = False
    for family in families(question):
        if time.monotonic() >= question.deadline:
            was_stopped = True
            break
        for arrangement in family:
            tried += 1
            fitted, peak = _fitted(question, arrangement)
            if nearest is None or peak < nearest[0]:
                nearest = peak, fitted
            if peak <= question.budget_bytes:
                least = least_step_us(question.costs, _scaled(question, fitted), fitted, question.cluster)
                heapq.heappush(waiting, (least, next(order), fitted))
                break
    found: dict[tuple[object, ...], Arranged] = {}
    while waiting:
        least, _, arrangement = heapq.heappop(waiting)
        key = kind_of(arrangement)
        known = found.get(key)
        if known is not None and known.times.step_us <= least:
            continue
        arranged = arrange(question, arrangement)
        if known is None or arranged.times.step_us < known.times.step_us:
            found[key] = arranged
    fitting = tuple(sorted(found.values(), key=_rank))
    if not fitting and nearest is None:
        nearest = _nearest(question)
    least_full = None if fitting or nearest is None else arrange(question, nearest[1])
    return ArrangementSearch(fitting, least_full, tried, was_stopped)


def _nearest(question: Question) -> tuple[int, Arrangement] | None:
    """Returns the lowest peak and its arrangement where state alone exceeds the budget everywhere."""
    kept = CHECKPOINTED[-1] if question.costs.layers else CHECKPOINTED[0]
    best: tuple[int, Arrangement] | None = None
    for base in _bases(question):
        arrangement, peak = _fitted(question, _split(question, replace(base, checkpointed=kept)))
        if best is None or peak < best[0]:
            best = peak, arrangement
        if time.monotonic() >= question.deadline:
            break
    return best


def _rank(one: Arranged) -> tuple[float, bool, int, int]:
    """Orders by step time, and where that is the same to four digits, by what changes the script least."""
    ways = one.arrangement
    used = sum(each > 1 for each in (ways.data, ways.tensor, ways.pipeline, ways.context, ways.expert))
    return float(f"{one.times.step_us:.4g}"), not ways.is_data_parallel, used, one.peak_bytes


def kind_of(arrangement: Arrangement) -> tuple[object, ...]:
    """Returns what makes two arrangements rows of their own: their dimensions and ZeRO stage."""
    one = arrangement
    return one.data, one.tensor, one.pipeline, one.context, one.expert, one.zero


def arrange(question: Question, arrangement: Arrangement) -> Arranged:
    """Returns an arrangement's memory and time."""
    scaled = _scaled(question, arrangement)
    stages = stage_peaks(question.costs, scaled, arrangement)
    times = step_times(question.costs, scaled, arrangement, question.cluster)
    return Arranged(arrangement, tuple(stages), times, question.samples)


def families(question: Question) -> Iterator[Iterator[Arrangement]]:
    """Yields arrangements that differ in checkpointing only, from the fastest to the one that keeps least.

    Those whose state alone exceeds the budget on the average stage are left out.
    """
    kept = list(itertools.product(OFFLOADED[:1], CHECKPOINTED))
    if question.cluster.host_bytes_per_us:
        kept += [("optimizer", checkpointed) for checkpointed in CHECKPOINTED]
        kept += [("activations", "none")]
    if not question.costs.layers:
        kept = [each for each in kept if each[1] == "none"]
    for base in _bases(question):
        for offloaded in dict.fromkeys(each for each, _ in kept):
            ways = [checkpointed for each, checkpointed in kept if each == offloaded]
            family = [replace(base, offloaded=offloaded, checkpointed=each) for each in ways]
            if _state_bytes(question, family[0]) <= question.budget_bytes:
                yield (_split(question, each) for each in family)


def _bases(question: Question) -> Iterator[Arrangement]:
    """Yields every division of the devices, with each ZeRO stage, schedule and number of micro-batches."""
    costs = question.costs
    for data, tensor, pipeline, context in dimensions(question):
        experts = [1]
        if costs.experts:
            experts += [each for each in _divisors(data) if each > 1]
        zeros = range(4) if data * context > 1 else (0,)
        for samples, micro_batches in _micro_batches(question, data, pipeline):
            for schedule in _schedules(costs, pipeline, micro_batches):
                for expert, zero in itertools.product(experts, zeros):
                    found = Arrangement(data, tensor, pipeline, context, expert, zero, micro_batches, samples, schedule)
                    if all(getattr(found, name) == value for name, value in question.fixed):
                        yield found


def dimensions(question: Question) -> Iterator[tuple[int, int, int, int]]:
    """Yields the data, tensor, pipeline and context ranks that multiply to the devices and divide the model.

    Tensor-parallel ranks share a node and divide the sizes of all matrices; each stage has a layer at least; sequences
    are divided only where attention ran.
    """
    costs, cluster = question.costs, question.cluster
    for tensor in _divisors(cluster.devices):
        divides = all(size % tensor == 0 for size in costs.sizes) and costs.sizes
        if tensor > 1 and (tensor > cluster.per_node or not divides or not costs.layers):
            continue
        for context in _divisors(cluster.devices // tensor):
            if context > 1 and not costs.has_attention:
                continue
            for pipeline in _divisors(cluster.devices // tensor // context):
                data = cluster.devices // tensor // context // pipeline
                if pipeline <= max(1, costs.layers) and question.samples % data == 0:
                    yield data, tensor, pipeline, context


def _micro_batches(question: Question, data: int, pipeline: int) -> Iterator[tuple[int, int]]:
    """Yields samples of a micro-batch and their number in an update."""
    own = question.samples // data
    for samples in _divisors(own):
        count = own // samples
        if count <= _MOST_MICRO_BATCHES and (pipeline == 1 or count > 1):
            yield samples, count


def _schedules(costs: LayerCosts, pipeline: int, micro_batches: int) -> Iterator[str]:
    if pipeline == 1:
        yield ""
        return
    for schedule in SCHEDULES:
        chunks = CHUNKS[schedule]
        if chunks == 1 or (micro_batches % pipeline == 0 and costs.layers >= chunks * pipeline):
            yield schedule


def _state_bytes(question: Question, arrangement: Arrangement) -> float:
    """Returns the parameters, gradients and optimizer state of the average stage."""
    scaled = _scaled(question, arrangement)
    parameters, gradients, state = scaled.state_sums[:3, -1].tolist()
    parts, zero = arrangement.shards, arrangement.zero
    held = (parameters + gradients) / (parts if zero > 1 else 1)
    held += 0.0 if arrangement.offloaded == "optimizer" else state / (parts if zero else 1)
    return float(held / arrangement.pipeline)


def _split(question: Question, arrangement: Arrangement) -> Arrangement:
    if arrangement.pipeline == 1:
        return arrangement
    scaled = _scaled(question, arrangement)
    return replace(arrangement, split=_time_split(scaled, arrangement.pipeline * arrangement.chunks))


@lru_cache(maxsize=1024)
def _time_split(scaled: ScaledCosts, chunks: int) -> tuple[int, ...]:
    return split_by_time(scaled.forward_us + scaled.backward_us, chunks)


def _fitted(question: Question, arrangement: Arrangement) -> tuple[Arrangement, int]:
    """Returns an arrangement with the split that fits: the fastest, else the one whose fullest stage holds least."""
    costs, scaled = question.costs, _scaled(question, arrangement)
    peaks = [stage.peak_bytes for stage in stage_peaks(costs, scaled, arrangement)]
    worst, budget = max(peaks), question.budget_bytes
    if worst <= budget or arrangement.pipeline == 1 or arrangement.chunks > 1 or sum(peaks) > budget * len(peaks):
        return arrangement, worst
    levelled = replace(arrangement, split=split_by_peak(costs, scaled, arrangement))
    lower = max(stage.peak_bytes for stage in stage_peaks(costs, scaled, levelled))
    return (levelled, lower) if lower < worst else (arrangement, worst)


@lru_cache(maxsize=1024)
def _scaled_of(costs: LayerCosts, cluster: Cluster, arrangement: Arrangement) -> ScaledCosts:
    return scale_costs(costs, arrangement, cluster)


def _scaled(question: Question, arrangement: Arrangement) -> ScaledCosts:
    """Returns the costs on a rank, which neither ZeRO's stage nor the pipeline changes."""
    bare = replace(arrangement, pipeline=1, zero=0, micro_batches=1, schedule="", split=())
    return _scaled_of(question.costs, question.cluster, bare)


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)
