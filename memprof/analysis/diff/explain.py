"""Explains a memory change in words: the likeliest cause first, and the few modules responsible."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.analysis.diff.causes import (
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
from memprof.analysis.diff.comparison import FRAME, Change, Diff, Pair, fold_layers
from memprof.analysis.diff.summary import NOTHING, OTHERS
from memprof.analysis.diff.traits import AGAIN, REST
from memprof.analysis.leaks.growth import LEAST_LEAK_BYTES
from memprof.units import format_bytes_change

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


def modules_of(diff: Diff, *, folds: bool = False) -> tuple[Change, ...]:
    """Returns the fewest modules that hold at least 90 % of a change, the largest first.

    Args:
        diff: The diff.
        folds: Take repeated layers that changed alike for one.
    """
    parts = fold_layers(diff.focus.parts["module"]) if folds else diff.focus.parts["module"]
    whole = diff.focus.bytes
    sign = 1 if whole >= 0 else -1
    alike = [one for one in parts if one.bytes * sign > 0 and one.name != OTHERS]
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


def explained_pair(diff: Diff) -> Pair:
    """Returns the pair to report the change in; where the peaks are equal, the common phase that changed most."""
    both = [pair for pair in diff.phases if pair.base is not None and pair.head is not None]
    if diff.focus.bytes or not both:
        return diff.focus
    return max(both, key=lambda pair: abs(pair.bytes))


def pieces(diff: Diff) -> Iterator[Cause]:
    """Reports an operator that holds most of the change and now runs on fewer, larger or on more, smaller pieces."""
    pair = explained_pair(diff)
    first = next(
        (one for one in pair.parts["op"] if one.bytes * pair.bytes > 0 and one.name not in (NOTHING, OTHERS)), None
    )
    if first is None or abs(first.bytes) < 0.5 * abs(pair.bytes):
        return
    before, after = (
        sum(names.get(first.name, 0) for phase, names in side.traits.operators.items() if phase != AGAIN)
        for side in (diff.base, diff.head)
    )
    if not before or not after or (after - before) * first.bytes >= 0:
        return
    how = "fewer, larger pieces" if after < before else "more, smaller pieces"
    yield Cause(
        "pieces",
        f"{first.name} runs on {how} ({before} calls in the base, {after} now), and its outputs changed by "
        f"{format_bytes_change(first.bytes)} in {pair.name}",
    )


def largest_parts(diff: Diff) -> Iterator[Cause]:
    """Reports the largest parts of the change in the phase it is reported in."""
    pair = explained_pair(diff)
    whole = pair.bytes
    if not whole:
        return
    category = next((one for one in pair.parts["category"] if one.bytes * whole > 0), None)
    if category is None:
        return
    phase = pair.head.phase if pair.head is not None else pair.name
    words = f"{format_bytes_change(category.bytes)} of {category.name} memory in {phase}"
    for kind, by in (("module", "in"), ("source", "allocated at"), ("op", "by")):
        parts = fold_layers(pair.parts[kind]) if kind == "module" else pair.parts[kind]
        first = next((one for one in parts if one.bytes * whole > 0 and one.name not in (NOTHING, OTHERS)), None)
        if first is not None:
            words += f", {format_bytes_change(first.bytes)} {by} {first.name}"
    new = [
        name
        for name in diff.head.traits.operators.get("forward", {})
        if name.startswith("aten.") and name not in diff.base.traits.operators.get("forward", {name: 0})
    ]
    if new and REST not in diff.base.traits.operators.get("forward", {}):
        words += f"; new in forward: {', '.join(new[:3])}"
    yield Cause(category.name, words)
