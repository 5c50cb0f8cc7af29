"""Causes of a memory change that its largest parts show: other pieces, and the parts themselves."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.analysis.diff.causes import Cause
from memprof.analysis.diff.comparison import Diff, Pair
from memprof.analysis.diff.summary import NOTHING, OTHERS
from memprof.analysis.diff.traits import AGAIN, REST
from memprof.units import format_bytes_change


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
        first = next(
            (one for one in pair.parts[kind] if one.bytes * whole > 0 and one.name not in (NOTHING, OTHERS)), None
        )
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
