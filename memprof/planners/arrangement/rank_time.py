"""The step time of an arrangement: computation, exposed communication, and the pipeline's bubble."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.planners.arrangement.arrangement import Arrangement, Cluster, Group
from memprof.planners.arrangement.layer_costs import LayerCosts, ScaledCosts
from memprof.planners.arrangement.pipeline import chunk_units, simulate
from memprof.trace.schema import Ints


@dataclass(frozen=True)
class StepTimes:
    """A step's time, by cause.

    Attributes:
        step_us: The whole step.
        compute_us: Of it, the busiest rank's computation and its recompute.
        communication_us: Of it, exposed communication of the busiest rank.
        bubble_us: Of it, that rank's waiting for other stages.
        update_us: Of it, the optimizer's update, with copies from and to the host.
    """

    step_us: float
    compute_us: float
    communication_us: float
    bubble_us: float
    update_us: float


@dataclass(frozen=True)
class _Rounds:
    """Times of one micro-batch through each chunk, and the exposed communication."""

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    communication_us: tuple[float, ...]
    once_us: float
    update_us: float
    send_us: float


def least_step_us(costs: LayerCosts, scaled: ScaledCosts, arrangement: Arrangement, cluster: Cluster) -> float:
    """Returns a lower bound of the step time, without running the schedule.

    A rank works for all micro-batches, waits first for the first to come through the chunks before its own, and
    afterwards for the last to go back through them.
    """
    rounds = _rounds(costs, scaled, arrangement, cluster)
    ranks, count = arrangement.pipeline, len(rounds.forward_us)
    total = 0.0
    for rank in range(ranks):
        own = range(rank, count, ranks)
        works = arrangement.micro_batches * sum(rounds.forward_us[each] + rounds.backward_us[each] for each in own)
        total = max(total, works + sum(rounds.forward_us[:rank]) + sum(rounds.backward_us[:rank]))
    return total + rounds.once_us + rounds.update_us


def step_times(costs: LayerCosts, scaled: ScaledCosts, arrangement: Arrangement, cluster: Cluster) -> StepTimes:
    """Returns the step time of an arrangement, its schedule run micro-batch by micro-batch."""
    rounds = _rounds(costs, scaled, arrangement, cluster)
    ranks, micro_batches = arrangement.pipeline, arrangement.micro_batches
    if ranks == 1:
        total = busiest = micro_batches * (rounds.forward_us[0] + rounds.backward_us[0])
        row = 0
    else:
        timed = simulate(
            arrangement.schedule, ranks, micro_batches, rounds.forward_us, rounds.backward_us, rounds.send_us
        )
        total, row = timed.total_us, int(np.argmax(timed.busy_us))
        busiest = timed.busy_us[row]
    inside = micro_batches * sum(rounds.communication_us[row::ranks])
    return StepTimes(
        step_us=total + rounds.once_us + rounds.update_us,
        compute_us=busiest - inside,
        communication_us=inside + rounds.once_us,
        bubble_us=total - busiest,
        update_us=rounds.update_us,
    )


def _rounds(costs: LayerCosts, scaled: ScaledCosts, arrangement: Arrangement, cluster: Cluster) -> _Rounds:
    chunks = chunk_units(arrangement, len(costs.names))
    ranks = arrangement.pipeline
    shards = cluster.group(arrangement.shards, arrangement.tensor)
    forward, backward, exchanged = [], [], []
    for first, end in chunks:
        ahead, back = float(scaled.forward_us[first:end].sum()), float(scaled.backward_us[first:end].sum())
        inside = float(scaled.communication_us[first:end].sum())
        if _gathers_each_round(arrangement):
            gathers = [shards.all_gather_us(each) for each in scaled.gathered_bytes[first:end].tolist()]
            scatters = [shards.reduce_scatter_us(each) for each in scaled.gradient_bytes[first:end].tolist()]
            again = gathers if arrangement.zero == 3 else [0.0] * len(gathers)
            late = _exposed(gathers, ahead), _exposed([a + b for a, b in zip(again, scatters, strict=True)], back)
            ahead, back, inside = ahead + late[0], back + late[1], inside + sum(late)
        forward.append(ahead)
        backward.append(back)
        exchanged.append(inside)
    once = update = 0.0
    for rank in range(ranks):
        inside_rank = np.concatenate([np.arange(first, end) for first, end in chunks[rank::ranks]])
        last_back, first_ahead = sum(backward[rank::ranks]), sum(forward[rank::ranks])
        once = max(once, _once_us(scaled, arrangement, shards, inside_rank, first_ahead, last_back))
        share = float(scaled.parameter_bytes[inside_rank].sum()) / costs.total_parameter_bytes
        parts = arrangement.shards if arrangement.zero else 1
        own = costs.update_us * share / parts
        if arrangement.offloaded == "optimizer" and cluster.host_bytes_per_us:
            own += 2 * float(scaled.state_bytes[inside_rank].sum()) / parts / cluster.host_bytes_per_us
        update = max(update, own)
    send = 0.0
    if ranks > 1:
        link = cluster.group(ranks, arrangement.devices // ranks)
        send = link.send_us(float(max(scaled.boundary_bytes[end - 1] for _, end in chunks[:-1])))
    return _Rounds(tuple(forward), tuple(backward), tuple(exchanged), once, update, send)


def _gathers_each_round(arrangement: Arrangement) -> bool:
    """Returns whether each micro-batch gathers parameters and reduces gradients, as fully_shard does.

    Stages of a pipeline keep them whole in stage 2 until the last micro-batch.
    """
    return arrangement.zero == 3 or (arrangement.zero == 2 and arrangement.pipeline == 1)


def _once_us(
    scaled: ScaledCosts,
    arrangement: Arrangement,
    shards: Group,
    inside: Ints,
    forward_us: float,
    backward_us: float,
) -> float:
    """Returns the exposed communication between data-parallel ranks that happens once in an update."""
    gradients = scaled.gradient_bytes[inside].tolist()
    if arrangement.zero < 2:
        reduced = _exposed([shards.all_reduce_us(each) for each in gradients], backward_us)
        # In stage 1 every rank updates its part, and all get the rest afterwards, with no computation to overlap with.
        parameters = float(scaled.parameter_bytes[inside].sum()) if arrangement.zero else 0.0
        return reduced + shards.all_gather_us(parameters)
    if _gathers_each_round(arrangement):
        return 0.0
    reduced = _exposed([shards.reduce_scatter_us(each) for each in gradients], backward_us)
    return reduced + _exposed(
        [shards.all_gather_us(each) for each in scaled.gathered_bytes[inside].tolist()], forward_us
    )


def _exposed(parts_us: list[float], computation_us: float) -> float:
    """Returns the time that collectives add to the computation they overlap with: at least the shortest of them.

    Args:
        parts_us: Time of each unit's collective.
        computation_us: Time of that computation.
    """
    busy = [each for each in parts_us if each > 0]
    return max(min(busy, default=0.0), sum(busy) - computation_us)
