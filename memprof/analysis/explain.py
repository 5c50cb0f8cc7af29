"""Says in words what a change of memory comes from: the likeliest cause first, and the few modules that hold it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from memprof.analysis.diff import Change, Diff
from memprof.analysis.summary import NOTHING, OTHERS, Summary
from memprof.units import format_bytes, format_bytes_change

#: Share of a change that the modules named must hold.
ENOUGH = 0.9
#: Growth from step to step below this is noise of caches and counters.
_LEAST_LEAK_BYTES = 1024
#: Share of a category's bytes that must change their type to be told of.
_LEAST_SHARE = 0.2


@dataclass(frozen=True)
class Cause:
    """One cause of a change.

    Attributes:
        kind: Such as ``batch``, ``leak``, ``dtype``, ``optimizer``, ``checkpoint``, ``parameters``, ``activations``.
        sentence: It in words.
    """

    kind: str
    sentence: str


def explain(diff: Diff) -> tuple[Cause, ...]:
    """Names the causes of a change, the one that others follow from first. None where nothing changed.

    What was set from outside (batch, allocator, plan) comes before what the code does over steps (leaks, kept graphs),
    that before what changes everywhere (types, optimizer, recompute), and last what single modules hold.
    """
    return tuple(_causes(diff))


def modules_of(diff: Diff) -> tuple[Change, ...]:
    """Returns the fewest modules that hold at least nine tenths of a change, the largest first."""
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
    for difference in diff.differences:
        kind = difference.what.replace(" ", "-")
        yield Cause(kind, f"{difference.what} differs: {difference.base} in the base, {difference.head} now")
    if base.plan != head.plan:
        yield Cause("plan", f"the plan changed: {base.plan or 'none'} in the base, {head.plan or 'none'} now")
    yield from _over_steps(base, head)
    if diff.is_unchanged:
        return
    yield from _optimizer(base, head)
    yield from _dtypes(base, head)
    yield from _recompute(base, head)
    yield from _parameters(diff)
    yield from _activations(diff)


def _over_steps(base: Summary, head: Summary) -> Iterator[Cause]:
    before, after = _growth(base.step_peaks), _growth(head.step_peaks)
    if after > max(before, 0) + _LEAST_LEAK_BYTES:
        yield Cause(
            "leak",
            f"each step holds {format_bytes(after)} more than the one before: something keeps tensors from step to "
            "step, such as a list of losses that are not detached",
        )
    kept = _activations_kept(head) - _activations_kept(base)
    if kept > _LEAST_LEAK_BYTES and after <= _LEAST_LEAK_BYTES:
        yield Cause(
            "graph",
            f"{format_bytes(kept)} of activations outlive backward: the graph is kept "
            "(retain_graph, or a loss that is held)",
        )


def _growth(peaks: tuple[int, ...]) -> int:
    """Returns by how much each step's peak is above the one before, at least; 0 where they do not all grow."""
    steps = [later - earlier for earlier, later in pairwise(peaks)]
    return max(0, min(steps)) if steps else 0


def _activations_kept(side: Summary) -> int:
    """Returns the activations that are still there in the optimizer's update."""
    spot = side.spots.get("optimizer")
    return 0 if spot is None else spot.parts["category"].get("activation", 0)


def _optimizer(base: Summary, head: Summary) -> Iterator[Cause]:
    if base.states == head.states:
        return
    grown = head.maxima.get("optimizer_state", 0) - base.maxima.get("optimizer_state", 0)
    names = [", ".join(side.states) or "nothing" for side in (base, head)]
    yield Cause(
        "optimizer", f"the optimizer keeps {names[1]} where it kept {names[0]}: {format_bytes_change(grown)} of state"
    )


def _dtypes(base: Summary, head: Summary) -> Iterator[Cause]:
    """Names categories whose bytes are of another type than before."""
    for category in ("activation", "parameter", "gradient", "optimizer_state"):
        before, after = base.dtypes.get(category, {}), head.dtypes.get(category, {})
        wholes = sum(before.values()), sum(after.values())
        if not all(wholes):
            continue
        shares = {
            dtype: (before.get(dtype, 0) / wholes[0], after.get(dtype, 0) / wholes[1]) for dtype in {**before, **after}
        }
        grown = {dtype: later - earlier for dtype, (earlier, later) in shares.items()}
        most = max(grown, key=lambda dtype: grown[dtype])
        least = min(grown, key=lambda dtype: grown[dtype])
        if grown[most] > _LEAST_SHARE and -grown[least] > _LEAST_SHARE:
            yield Cause(
                "dtype",
                f"{category} memory is {most} to {shares[most][1]:.0%} where it was {shares[most][0]:.0%}, {least} to "
                f"{shares[least][1]:.0%} where it was {shares[least][0]:.0%}",
            )
            return


def _recompute(base: Summary, head: Summary) -> Iterator[Cause]:
    before, after = base.recomputed_ops, head.recomputed_ops
    if before == after or abs(after - before) < 0.05 * max(before, after):
        return
    what = "less is" if after < before else "more is"
    yield Cause(
        "checkpoint",
        f"{what} run again in backward: {before} operators in the base, {after} now (activation checkpointing)",
    )


def _parameters(diff: Diff) -> Iterator[Cause]:
    grown = diff.head.parameter_bytes - diff.base.parameter_bytes
    if not grown:
        return
    named = [one for one in diff.focus.parts["storage"] if one.bytes * grown > 0 and one.name.startswith("parameter ")]
    names = ", ".join(one.name.removeprefix("parameter ").rpartition(" #")[0] for one in named[:3])
    more = f", most in {names}" if names else ""
    yield Cause("parameters", f"the model's parameters take {format_bytes_change(grown)}{more}")


def _activations(diff: Diff) -> Iterator[Cause]:
    """Names what the change is made of in the phase in which it is told."""
    pair = diff.focus
    whole = pair.bytes
    if not whole:
        return
    sign = 1 if whole > 0 else -1
    category = next((one for one in pair.parts["category"] if one.bytes * sign > 0), None)
    if category is None:
        return
    words = f"{format_bytes_change(category.bytes)} of {category.name} memory in {pair.name if pair.base else 'it'}"
    if pair.head is not None:
        words = f"{format_bytes_change(category.bytes)} of {category.name} memory in {pair.head.phase}"
    for kind, by in (("module", "in"), ("source", "made at"), ("op", "by")):
        first = next(
            (one for one in pair.parts[kind] if one.bytes * sign > 0 and one.name not in (NOTHING, OTHERS)), None
        )
        if first is not None:
            words += f", {format_bytes_change(first.bytes)} {by} {first.name}"
    yield Cause(category.name, words)
