"""What a planner that knows the whole step would need for it, beside what the caching allocator takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.replay.allocator.events import replay
from memprof.replay.allocator.rules import Settings
from memprof.replay.allocator.steps import requests_of_step
from memprof.replay.static.inplace import find_candidates, in_place, operator_name
from memprof.replay.static.intervals import has_reads, needed_lives, recorded_lives
from memprof.replay.static.offsets import best_fit, greedy_by_size
from memprof.trace.step import Step

#: Steps with more storages are not placed: it takes the square of their number.
_MOST_LIVES = 100_000


@dataclass(frozen=True)
class InPlace:
    """What one operator would save by writing its result over an input.

    Attributes:
        operator: Its bare name.
        calls: Calls that could.
        bytes: Bytes of results that would need no memory of their own.
        saved_at_bound: What the lower bound falls by if this operator alone does.
    """

    operator: str
    calls: int
    bytes: int
    saved_at_bound: int


@dataclass(frozen=True)
class StaticReport:
    """What a step needs, planned ahead and not; all in bytes.

    Attributes:
        step: Number of the step.
        device: Device whose memory it is.
        storages: Storages and workspaces planned.
        has_reads: Whether it is known what operators read; else the lives planned are those recorded.
        total: All of them side by side.
        reserved: What the caching allocator reserves for them, as modelled.
        allocated: What it gives out at most.
        kept_bound: Most that is alive at once, as recorded.
        bound: Most that is still needed at once: what Python holds on to beyond its last use is not.
        greedy: Height of the plan that places the largest first; None where there are too many to place.
        best_fit: Height of the plan that places in order of birth; None likewise.
        in_place_bound: The bound with every operator in place that can be.
        in_place_greedy: Height of the plan that places the largest first, of those; None likewise.
        in_place: What operators would save, most first.
    """

    step: int
    device: str
    storages: int
    has_reads: bool
    total: int
    reserved: int
    allocated: int
    kept_bound: int
    bound: int
    greedy: int | None
    best_fit: int | None
    in_place_bound: int
    in_place_greedy: int | None
    in_place: tuple[InPlace, ...]


def build_static_report(step: Step, settings: Settings | None = None) -> StaticReport:
    """Plans a step ahead and compares that with what the caching allocator takes.

    Args:
        step: The step, recorded or predicted.
        settings: What the caching allocator is told; torch's defaults where left out.
    """
    asked = requests_of_step(step)
    dynamic = replay(asked.requests, settings)
    kept, needed = recorded_lives(step, asked.device), needed_lives(step, asked.device)
    candidates = find_candidates(step, needed)
    joined = in_place(needed, candidates)
    names = np.array([operator_name(str(step.ops.name[op])) for op in candidates.op_id.tolist()], dtype=object)
    bound = needed.lower_bound()
    operators = []
    for name in sorted(set(names.tolist())):
        own = candidates.take(names == name)
        operators.append(
            InPlace(
                operator=name,
                calls=len(set(own.op_id.tolist())),
                bytes=int(needed.size[own.life].sum()),
                saved_at_bound=bound - in_place(needed, own).lower_bound(),
            )
        )
    can_place = len(needed) <= _MOST_LIVES
    return StaticReport(
        step=step.number,
        device=asked.device,
        storages=len(needed),
        has_reads=has_reads(step),
        total=needed.total(),
        reserved=int(dynamic.reserved().max(initial=0)),
        allocated=int(dynamic.allocated().max(initial=0)),
        kept_bound=kept.lower_bound(),
        bound=bound,
        greedy=greedy_by_size(needed).height if can_place else None,
        best_fit=best_fit(needed).height if can_place else None,
        in_place_bound=joined.lower_bound(),
        in_place_greedy=greedy_by_size(joined).height if can_place else None,
        in_place=tuple(sorted(operators, key=lambda one: (-one.saved_at_bound, -one.bytes, one.operator))),
    )
