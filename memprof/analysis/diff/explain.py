"""Explains a memory change in words: the likeliest cause first, and the few modules responsible."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.analysis.diff.causes import (
    LEAST_LEAK_BYTES,
    LEAST_LEAK_SHARE,
    Cause,
    dtypes,
    gradients_in_forward,
    graphs,
    growth_of,
    held_tensors,
    leak,
    model_parts,
    optimizer_states,
    recompute,
    tensors_outside,
    trained_parameters,
)
from memprof.analysis.diff.comparison import FRAME, Change, Diff
from memprof.analysis.diff.part_causes import explained_pair, largest_parts, pieces
from memprof.analysis.diff.summary import OTHERS

__all__ = ["ENOUGH", "Cause", "explain", "modules_of"]

#: Minimum share of a change that the named modules must hold together.
ENOUGH = 0.9
#: Causes with a smaller share of the change are reported after its largest parts.
_MOST_OF_CHANGE = 0.5


def explain(diff: Diff) -> tuple[Cause, ...]:
    """Lists the causes of a change, root causes first. None where nothing changed.

    External settings (batch, allocator, plan) come first, then what accumulates over steps (leaks, kept graphs), then
    what changes everywhere (dtypes, optimizer, recompute), and last what single modules hold.
    """
    return tuple(_causes(diff))


def modules_of(diff: Diff) -> tuple[Change, ...]:
    """Returns the fewest modules that hold at least 90 % of a change, the largest first."""
    whole = diff.focus.bytes
    sign = 1 if whole >= 0 else -1
    alike = [one for one in diff.focus.parts["module"] if one.bytes * sign > 0 and one.name != OTHERS]
    chosen, held = [], 0
    for one in sorted(alike, key=lambda change: -abs(change.bytes)):
        if held >= ENOUGH * abs(whole):
            break
        chosen.append(one)
        held += abs(one.bytes)
    return tuple(chosen)


def _causes(diff: Diff) -> Iterator[Cause]:
    base, head = diff.base, diff.head
    # Micro-batches first: splitting a batch changes the shape of its parts.
    for difference in sorted(diff.differences, key=lambda one: (one.what == "batch", FRAME.index(one.what))):
        kind = difference.what.replace(" ", "-")
        yield Cause(kind, f"{difference.what} differs: {difference.base} in the base, {difference.head} now")
    if base.plan != head.plan:
        yield Cause("plan", f"the plan changed: {base.plan or 'none'} in the base, {head.plan or 'none'} now")
    grown = growth_of(head) - growth_of(base)
    if abs(grown) >= LEAST_LEAK_BYTES:
        yield leak(grown, base, head)
    if diff.is_unchanged:
        return
    kept = tuple(graphs(base.traits, head.traits))
    yield from kept
    yield from dtypes(base, head)
    yield from optimizer_states(base, head)
    yield from recompute(base.traits, head.traits)
    yield from model_parts(base, head)
    yield from trained_parameters(base, head)
    held: list[Cause] = []
    if not kept and all(difference.what != "micro-batches" for difference in diff.differences):
        yield from gradients_in_forward(base, head)  # micro-batches keep them, so an evaluation may too
        if abs(grown) < LEAST_LEAK_BYTES:
            held = [*held_tensors(base.traits, head.traits), *tensors_outside(base, head)]
    whole = abs(explained_pair(diff).bytes)
    yield from (cause for cause in held if abs(cause.bytes) >= _MOST_OF_CHANGE * whole)
    is_growing = 0 < abs(grown) < LEAST_LEAK_BYTES
    if is_growing and abs(grown) >= LEAST_LEAK_SHARE * whole:
        yield leak(grown, base, head)
    yield from pieces(diff)
    yield from largest_parts(diff)
    yield from (cause for cause in held if abs(cause.bytes) < _MOST_OF_CHANGE * whole)
    if is_growing and abs(grown) < LEAST_LEAK_SHARE * whole:
        yield leak(grown, base, head)
