"""Memory a static planner that sees the whole step would need, compared with the caching allocator."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memprof.analysis.allocator.allocator_report import ALLOCATOR_SCHEMA
from memprof.json_values import Json, key, to_json
from memprof.replay.allocator.events import replay
from memprof.replay.allocator.rules import Settings
from memprof.replay.allocator.steps import requests_of_step
from memprof.replay.static.intervals import (
    find_candidates,
    has_reads,
    in_place,
    needed_lives,
    recorded_lives,
)
from memprof.replay.static.offsets import best_fit, greedy_by_size, search_offsets
from memprof.trace.operator_facts import bare_name
from memprof.trace.step import Step

#: Steps with more storages are not placed: placement is quadratic in their number.
_MOST_LIVES = 100_000
#: Default time for a search below the heuristics, where they are above the bound.
SEARCH_S = 2.0


@dataclass(frozen=True)
class InPlace:
    """What one operator would save by running in place.

    Attributes:
        operator: Its bare name.
        calls: Number of calls that could run in place.
        bytes: Result bytes that would need no memory of their own.
        saved_at_bound: By how many bytes the lower bound falls if only this operator runs in place.
    """

    operator: str
    calls: int
    bytes: int
    saved_at_bound: int


@dataclass(frozen=True)
class StaticReport:
    """Memory a step needs with and without static planning, in bytes.

    Attributes:
        step: Number of the step.
        device: Device of the memory.
        storages: Number of storages and workspaces planned.
        has_reads: Whether operator reads are recorded; otherwise the recorded lifetimes are planned.
        total: Sum of all storages, without reuse.
        reserved: Modelled reserved bytes of the caching allocator.
        allocated: Its modelled peak of allocated bytes.
        kept_bound: Peak live bytes, as recorded.
        bound: Peak bytes still needed: excludes what Python references beyond its last use.
        greedy: Height of the plan that places the largest first; None where there are too many to place.
        best_fit: Height of the plan that places in order of allocation; None likewise.
        searched: Height of the lowest plan found by a search below these two; None likewise.
        in_place_bound: The bound with every possible operator in place.
        in_place_greedy: Height of the largest-first plan with those in place; None likewise.
        in_place: Savings by operator, largest first.
    """

    step: int
    device: str
    storages: int
    has_reads: bool
    total: int = field(metadata=key("total_bytes"))
    reserved: int = field(metadata=key("reserved_bytes"))
    allocated: int = field(metadata=key("allocated_bytes"))
    kept_bound: int = field(metadata=key("alive_bound_bytes"))
    bound: int = field(metadata=key("needed_bound_bytes"))
    greedy: int | None = field(metadata=key("greedy_by_size_bytes"))
    best_fit: int | None = field(metadata=key("best_fit_bytes"))
    searched: int | None = field(metadata=key("searched_bytes"))
    in_place_bound: int = field(metadata=key("in_place_bound_bytes"))
    in_place_greedy: int | None = field(metadata=key("in_place_greedy_by_size_bytes"))
    in_place: tuple[InPlace, ...]


def build_static_report(step: Step, settings: Settings | None = None, *, search_s: float = SEARCH_S) -> StaticReport:
    """Plans a step statically and compares the result with the caching allocator.

    Args:
        step: The step, recorded or predicted.
        settings: Settings of the caching allocator; torch's defaults where left out.
        search_s: Time for a search below the heuristics, where they are above the bound.
    """
    issued = requests_of_step(step)
    dynamic = replay(issued.requests, settings)
    kept, needed = recorded_lives(step, issued.device), needed_lives(step, issued.device)
    candidates = find_candidates(step, needed)
    joined = in_place(needed, candidates)
    names = np.array([bare_name(str(step.ops.name[op])) for op in candidates.op_id.tolist()], dtype=object)
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
    by_size, by_birth = (greedy_by_size(needed), best_fit(needed)) if can_place else (None, None)
    searched = None
    if by_size is not None and by_birth is not None:
        lower = min(by_size, by_birth, key=lambda one: one.height)
        searched = search_offsets(needed, lower, time_limit_s=search_s)
    return StaticReport(
        step=step.number,
        device=issued.device,
        storages=len(needed),
        has_reads=has_reads(step),
        total=needed.total(),
        reserved=int(dynamic.reserved().max(initial=0)),
        allocated=int(dynamic.allocated().max(initial=0)),
        kept_bound=kept.lower_bound(),
        bound=bound,
        greedy=None if by_size is None else by_size.height,
        best_fit=None if by_birth is None else by_birth.height,
        searched=None if searched is None else searched.height,
        in_place_bound=joined.lower_bound(),
        in_place_greedy=greedy_by_size(joined).height if can_place else None,
        in_place=tuple(sorted(operators, key=lambda one: (-one.saved_at_bound, -one.bytes, one.operator))),
    )


def static_to_json(report: StaticReport) -> Json:
    """Returns the static planner's report: bytes, stable keys."""
    return {"schema": ALLOCATOR_SCHEMA, "has_history": True, **to_json(report)}
