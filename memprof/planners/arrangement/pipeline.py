"""Schedules of pipeline stages: the order on each rank, and the peak of each rank under them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from memprof.planners.arrangement.arrangement import Arrangement
from memprof.planners.arrangement.layer_costs import LayerCosts, ScaledCosts
from memprof.policies.shard.policy import Shard
from memprof.trace.schema import Floats


class Work(NamedTuple):
    """A round of forward or backward of one micro-batch through one chunk.

    Attributes:
        is_forward: Whether it is a forward.
        chunk: The chunk, in order of forward over all ranks.
        micro_batch: The micro-batch.
    """

    is_forward: bool
    chunk: int
    micro_batch: int


class Moment(NamedTuple):
    """A moment of a rank, for its memory.

    Attributes:
        is_forward: Whether a forward runs.
        local: The rank's chunk that runs, 0 first.
        held: Micro-batches that each of the rank's chunks holds in addition to the one that runs.
    """

    is_forward: bool
    local: int
    held: tuple[int, ...]


@lru_cache(maxsize=4096)
def rank_order(schedule: str, ranks: int, rank: int, micro_batches: int, chunks: int) -> tuple[Work, ...]:
    """Returns what a rank of the pipeline does, in order.

    GPipe runs all forwards first (Huang et al. 2019); 1F1B as many as there are ranks from this one on, then one
    backward after each (Narayanan et al. 2021, PipeDream-2BW); interleaved does so with several chunks a rank, in
    groups of as many micro-batches as ranks (Narayanan et al. 2021, Megatron-LM, section 2.2).
    """
    forwards, backwards = [], []
    for number in range(micro_batches * chunks):
        local = number // ranks % chunks if chunks > 1 else 0
        micro = number // (ranks * chunks) * ranks + number % ranks if chunks > 1 else number
        forwards.append(Work(True, local * ranks + rank, micro))
        backwards.append(Work(False, (chunks - 1 - local) * ranks + rank, micro))
    if schedule == "GPipe":
        return (*forwards, *backwards)
    ahead = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return (*order, *backwards[len(forwards) - ahead :])


@lru_cache(maxsize=4096)
def fullest_moments(schedule: str, ranks: int, rank: int, micro_batches: int, chunks: int) -> tuple[Moment, ...]:
    """Returns the moments of a rank at which it may hold most: none holds fewer of every chunk than another alike."""
    if schedule == "GPipe":
        return Moment(True, 0, (micro_batches - 1,)), Moment(False, 0, (micro_batches - 1,))
    # No rank is further ahead than this, so that more micro-batches repeat what was seen.
    micro_batches = min(micro_batches, 4 * ranks)
    held = [0] * chunks
    found: dict[Moment, None] = {}
    for work in rank_order(schedule, ranks, rank, micro_batches, chunks):
        local = work.chunk // ranks
        if not work.is_forward:
            held[local] -= 1
        found[Moment(work.is_forward, local, tuple(held))] = None
        if work.is_forward:
            held[local] += 1
    return tuple(moment for moment in found if not any(_exceeds(other, moment) for other in found))


def _exceeds(other: Moment, moment: Moment) -> bool:
    alike = other[:2] == moment[:2] and other.held != moment.held
    return alike and all(a >= b for a, b in zip(other.held, moment.held, strict=True))


@dataclass(frozen=True)
class Timed:
    """A schedule's times.

    Attributes:
        total_us: From the first forward to the last backward.
        busy_us: Of it, how long each rank works.
    """

    total_us: float
    busy_us: tuple[float, ...]


def simulate(
    schedule: str,
    ranks: int,
    micro_batches: int,
    forward_us: Sequence[float],
    backward_us: Sequence[float],
    send_us: float,
) -> Timed:
    """Runs a schedule: a chunk's forward starts when the chunk before it has sent its output, backward the other way.

    Args:
        schedule: One of arrangement.SCHEDULES.
        ranks: Ranks of the pipeline.
        micro_batches: Micro-batches.
        forward_us: Time of each chunk's forward, in order of forward.
        backward_us: Time of each chunk's backward.
        send_us: Time from the end of a round on one rank until the next has its result.
    """
    count = len(forward_us)
    chunks = count // ranks
    orders = [rank_order(schedule, ranks, rank, micro_batches, chunks) for rank in range(ranks)]
    done_forward = [[-1.0] * micro_batches for _ in range(count)]
    done_backward = [[-1.0] * micro_batches for _ in range(count)]
    clock, position = [0.0] * ranks, [0] * ranks
    waiting = set(range(ranks))
    while waiting:
        moved = False
        for rank in sorted(waiting):
            order = orders[rank]
            while position[rank] < len(order):
                is_forward, chunk, micro = order[position[rank]]
                if is_forward:
                    ready = done_forward[chunk - 1][micro] if chunk else 0.0
                else:
                    ready = done_backward[chunk + 1][micro] if chunk < count - 1 else done_forward[chunk][micro]
                if ready < 0:
                    break
                travels = (chunk > 0) if is_forward else (chunk < count - 1)
                start = max(clock[rank], ready + (send_us if travels else 0.0))
                clock[rank] = start + (forward_us if is_forward else backward_us)[chunk]
                (done_forward if is_forward else done_backward)[chunk][micro] = clock[rank]
                position[rank] += 1
                moved = True
            if position[rank] == len(order):
                waiting.discard(rank)
        if not moved:
            raise AssertionError(f"{schedule} over {ranks} ranks never ends")
    busy = [0.0] * ranks
    for chunk in range(count):
        busy[chunk % ranks] += micro_batches * (forward_us[chunk] + backward_us[chunk])
    return Timed(max(clock), tuple(busy))


@dataclass(frozen=True)
class StagePeak:
    """The memory of the ranks of one pipeline stage.

    Attributes:
        state_bytes: Parameters, gradients and optimizer state between updates, and buffers.
        activation_bytes: What micro-batches hold at the peak, gathered parameters and unreduced gradients included.
        peak_bytes: The peak.
        held: Micro-batches held at the peak, in chunks.
        where: ``forward``, ``backward`` or ``update``.
        units: First and last unit of each of its chunks, the last excluded.
    """

    state_bytes: int
    activation_bytes: int
    peak_bytes: int
    held: int
    where: str
    units: tuple[tuple[int, int], ...]


def chunk_units(arrangement: Arrangement, units: int) -> list[tuple[int, int]]:
    """Returns the first unit and the one after the last of each chunk, in order of forward."""
    if not arrangement.split:
        return [(0, units)]
    ends = np.cumsum(arrangement.split).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def stage_peaks(costs: LayerCosts, scaled: ScaledCosts, arrangement: Arrangement) -> list[StagePeak]:
    """Returns the memory of every stage, in order of forward."""
    chunks = chunk_units(arrangement, len(costs.names))
    ranks = arrangement.pipeline
    return [stage_peak(costs, scaled, arrangement, rank, tuple(chunks[rank::ranks])) for rank in range(ranks)]


def stage_peak(
    costs: LayerCosts,
    scaled: ScaledCosts,
    arrangement: Arrangement,
    rank: int,
    chunks: tuple[tuple[int, int], ...],
) -> StagePeak:
    """Returns the memory of one stage.

    Args:
        costs: The recorded costs.
        scaled: The same, on a rank of the arrangement.
        arrangement: The arrangement.
        rank: The stage.
        chunks: First and last unit of each of its chunks, the last excluded.
    """
    sums = scaled.state_sums
    parameters, gradients, state, casts, gathered = np.sum(
        [sums[:, end] - sums[:, first] for first, end in chunks], axis=0
    ).tolist()
    parts, zero = arrangement.shards, arrangement.zero
    several = arrangement.micro_batches > 1
    if arrangement.offloaded == "optimizer":
        state = max(float(scaled.state_bytes[first:end].max(initial=0.0)) for first, end in chunks)
    resident = (state / parts if zero else state) + costs.other_bytes
    share = arrangement.samples / costs.samples / arrangement.context
    resident += costs.input_bytes * share * arrangement.micro_batches
    resident += parameters / parts if zero > 1 else parameters
    between = gradients / parts if zero > 1 else gradients  # gradients from backward to the update
    update = costs.update_bytes * parameters / costs.total_parameter_bytes / (parts if zero else 1)
    best = StagePeak(int(resident + between), int(update), int(resident + between + update), 0, "update", chunks)

    in_backward = scaled.backward_bytes
    own: Floats | float = 0.0  # gradients in addition to the activations while a unit's backward runs
    in_forward = between if zero > 1 or several or costs.keeps_gradients else 0.0
    if zero < 2:
        temporary = casts + scaled.recast_bytes + (min(gradients, Shard.bucket_mib * 2.0**20) if parts > 1 else 0.0)
        if several or costs.adds_gradients:
            own = gradients
        else:
            in_backward = scaled.first_backward_bytes
            own = gradients - (sums[1, 1:] - sums[1, chunks[0][0]])  # of the units after each
    elif zero == 2 and several and arrangement.pipeline > 1:
        temporary, own = 2 * gathered, between  # gradients stay whole until the last micro-batch is through
    else:
        own = between + 2 * scaled.gradient_bytes  # as backward makes them, and in the buffer that is reduced
        temporary = gathered if zero == 2 else _gathered_at_once(scaled, chunks)

    received = [float(scaled.boundary_bytes[first - 1]) if first else 0.0 for first, _ in chunks]
    kept = [
        float(scaled.kept_sums[end] - scaled.kept_sums[first]) + input_bytes
        for (first, end), input_bytes in zip(chunks, received, strict=True)
    ]
    if zero < 2:  # each micro-batch makes copies of parameters of its own
        kept = [each + float(sums[3, end] - sums[3, first]) for each, (first, end) in zip(kept, chunks, strict=True)]
    highest = [_highest(scaled, first, end, in_backward + own, in_forward) for first, end in chunks]
    for is_forward, local, held in _moments(arrangement, rank, len(chunks)):
        others = sum(number * each for number, each in zip(held, kept, strict=True))
        total = others + highest[local][0 if is_forward else 1] + received[local] + temporary
        if resident + total > best.peak_bytes:
            where = "forward" if is_forward else "backward"
            best = StagePeak(int(resident + between), int(total), int(resident + total), sum(held) + 1, where, chunks)
    return best


def _moments(arrangement: Arrangement, rank: int, chunks: int) -> tuple[Moment, ...]:
    if arrangement.pipeline == 1:
        return Moment(True, 0, (0,)), Moment(False, 0, (0,))
    return fullest_moments(arrangement.schedule, arrangement.pipeline, rank, arrangement.micro_batches, chunks)


def _gathered_at_once(scaled: ScaledCosts, chunks: tuple[tuple[int, int], ...]) -> float:
    """Returns what ZeRO-3 has whole: the unit that runs, the next one, and the units before and after the layers."""
    units = len(scaled.gathered_bytes)
    inside = np.concatenate([np.arange(first, end) for first, end in chunks])
    is_layer = (inside > 0) & (inside < units - 1)
    whole = scaled.gathered_bytes[inside]
    return float(whole[~is_layer].sum() + np.sort(whole[is_layer])[-2:].sum())


def _highest(scaled: ScaledCosts, first: int, end: int, in_backward: Floats, in_forward: float) -> tuple[float, float]:
    """Returns the highest bytes in forward and in backward of a chunk.

    Args:
        scaled: Costs of each unit.
        first: The chunk's first unit.
        end: The unit after its last.
        in_backward: Peak of each unit's backward above what earlier units keep, with the gradients that exist then.
        in_forward: Gradients that exist in forward.
    """
    before = scaled.kept_sums[first:end] - scaled.kept_sums[first]
    forward = before + scaled.forward_bytes[first:end] + in_forward
    backward = before + in_backward[first:end]
    return float(forward.max(initial=0.0)), float(backward.max(initial=0.0))
