"""Schedules of pipeline stages: the order on each rank, what each holds, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple


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

    @property
    def bubble(self) -> float:
        """The share of time in which the busiest rank waits, of the time that it works: (p-1)/m where all are equal."""
        return self.total_us / max(self.busy_us) - 1 if max(self.busy_us, default=0.0) > 0 else 0.0


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
