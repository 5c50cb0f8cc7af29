"""Causes of a memory change, each with its evidence. ``explain`` orders them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from memprof.analysis.diff.moved_lines import with_moved_lines
from memprof.analysis.diff.summary import Summary
from memprof.analysis.diff.traits import AGAIN, REST, Traits
from memprof.analysis.leaks.growth import LEAST_LEAK_BYTES
from memprof.units import format_bytes, format_bytes_change

#: Growth below LEAST_LEAK_BYTES comes after other causes, and last where it is less than this share of the change.
LEAST_LEAK_SHARE = 0.01
#: Minimum share of what backward reads that is kept, or that no backward reads, to be reported.
_LEAST_KEPT = 0.2
#: Minimum share of the parameters whose gradients appear or disappear to be reported.
_LEAST_TRAINED = 0.1
#: Minimum share of the peak held by tensors outside model and optimizer.
_LEAST_OUTSIDE = 0.01
#: Minimum change in an operator's recompute ratio to be reported where the model changed too.
_LEAST_AGAIN = 0.1
#: Minimum share of a category's bytes that change dtype to be reported.
_LEAST_SHARE = 0.2


@dataclass(frozen=True)
class Cause:
    """One cause of a change.

    Attributes:
        kind: What differs besides the code (``batch``, ``micro-batches``, ``allocator-settings``, ...), ``plan``,
            ``leak``, ``graph``, ``no-grad``, ``dtype``, ``optimizer``, ``checkpoint``, ``parameters``, ``modules``,
            ``gradient``, ``held``, ``pieces``, or the category of memory that changed most.
        sentence: Its description.
        bytes: Bytes added or removed by this cause alone, where that can be determined; else 0.
    """

    kind: str
    sentence: str
    bytes: int = 0


def leak(grown: int, base: Summary, head: Summary) -> Cause:
    """Describes a change of the growth per step.

    Args:
        grown: Additional bytes of growth per step over the base; negative where it grows less.
        base: The base.
        head: The summary compared with it.
    """
    side, other = (head.traits.held, base.traits.held) if grown > 0 else (base.traits.held, head.traits.held)
    # What a name references until the next step replaces it also survives the step, but does not accumulate.
    exactly = [place for place, (_, size) in side.items() if size == abs(grown) and place not in ("", REST)]
    lines = _made_at(exactly or _names_of_more(side, other))
    if grown > 0:
        return Cause(
            "leak",
            f"memory grows by {format_bytes(grown)} per step: tensors are kept across steps, for example in a list of "
            f"losses or outputs{lines}",
        )
    return Cause("leak", f"memory no longer grows by {format_bytes(-grown)} per step{lines and f', as it did{lines}'}")


def growth_of(side: Summary) -> int:
    """Returns the growth per step; 0 where undecided."""
    return 0 if math.isnan(side.growth_bytes) else int(side.growth_bytes)


def _made_at(places: list[str]) -> str:
    return f" (allocated at {', '.join(places[:2])})" if places else ""


def _names_of_more(side: Mapping[str, tuple[int, int]], other: Mapping[str, tuple[int, int]]) -> list[str]:
    """Returns the lines or shapes with more tensors than on the other side, the most bytes first."""
    sizes = [{name: size for name, (_, size) in held.items()} for held in (other, side)]
    moved = dict(zip(with_moved_lines(*sizes), other.values(), strict=True))
    ordered = sorted(side, key=lambda name: -side[name][1])
    return [name for name in ordered if name not in ("", REST) and side[name][0] > moved.get(name, (0, 0))[0]]


def graphs(base: Traits, head: Traits) -> Iterator[Cause]:
    """Reports graphs that outlive their backward, and those without a backward."""
    before, after = _share(base.graph_bytes, base.saved_bytes), _share(head.graph_bytes, head.saved_bytes)
    if abs(after - before) > _LEAST_KEPT:
        size = format_bytes(max(base.graph_bytes, head.graph_bytes))
        yield Cause(
            "graph",
            f"{size} already read by backward stay live until the next step: the graph is kept (retain_graph, and a "
            "reference to a loss or output)"
            if after > before
            else f"{size} already read by backward no longer stay live until the next step: the graph is freed",
        )
    before, after = _share(base.unread_bytes, base.saved_bytes), _share(head.unread_bytes, head.saved_bytes)
    if abs(after - before) > _LEAST_KEPT:
        size = format_bytes(max(base.unread_bytes, head.unread_bytes))
        yield Cause(
            "no-grad",
            f"the model is called without a following backward, but {size} are saved for one: an evaluation "
            "outside torch.no_grad()"
            if after > before
            else f"{size} are no longer saved for a backward that never runs",
        )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float(part > 0)


def optimizer_states(base: Summary, head: Summary) -> Iterator[Cause]:
    """Reports changed optimizer state per parameter."""
    if base.states == head.states:
        return
    grown = head.maxima.get("optimizer_state", 0) - base.maxima.get("optimizer_state", 0)
    names = [", ".join(side.states) or "nothing" for side in (base, head)]
    yield Cause(
        "optimizer", f"the optimizer keeps {names[1]} instead of {names[0]}: {format_bytes_change(grown)} of state"
    )


def dtypes(base: Summary, head: Summary) -> Iterator[Cause]:
    """Reports categories whose dtype changed."""
    for category in ("activation", "parameter", "gradient", "optimizer_state"):
        before, after = (
            {dtype: size for dtype, size in side.dtypes.get(category, {}).items() if dtype != "unknown"}
            for side in (base, head)
        )
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
                f"{category} memory is {shares[most][1]:.0%} {most} (was {shares[most][0]:.0%}) and "
                f"{shares[least][1]:.0%} {least} (was {shares[least][0]:.0%})",
            )
            return


def recompute(base: Traits, head: Traits) -> Iterator[Cause]:
    """Reports a changed share of forward that is recomputed in backward."""
    runs = [sum(side.operators.get(AGAIN, {}).values()) for side in (base, head)]
    before, after = runs
    if before == after:
        return
    if all(runs) and base.parameters != head.parameters:
        # More layers mean more recompute: only a different share means a different choice.
        if abs(_again(head) - _again(base)) < _LEAST_AGAIN:
            return
    elif abs(after - before) < 0.05 * max(runs):
        return
    what = "less" if after < before else "more"
    yield Cause(
        "checkpoint",
        f"{what} recompute in backward: {before} operators in the base, {after} now (activation checkpointing)",
    )


def _again(traits: Traits) -> float:
    """Returns the recompute ratio of the operator that is recomputed most."""
    again, forward = traits.operators.get(AGAIN, {}), traits.operators.get("forward", {})
    return max((count / forward[name] for name, count in again.items() if forward.get(name)), default=0.0)


def model_parts(base: Summary, head: Summary) -> Iterator[Cause]:
    """Reports parameters added, removed or reshaped, then modules whose number changed."""
    grown = head.parameter_bytes - base.parameter_bytes
    before, after = base.traits.parameters, head.traits.parameters
    types = _changed_counts(base.traits.modules, head.traits.modules)
    if before != after or (grown and not types):
        named = [
            f"{name} is {after[name]} (was {before[name]})"
            if name in before and name in after
            else f"{name} is {'new' if name in after else 'removed'} ({after[name] if name in after else before[name]})"
            for name in {**after, **before}
            if before.get(name) != after.get(name)
        ]
        more = f" and {len(named) - 3} more" if len(named) > 3 else ""
        words = f": {'; '.join(named[:3])}{more}" if named else ""
        change = f"changed by {format_bytes_change(grown)}" if grown else "have other names or shapes"
        yield Cause("parameters", f"the model's parameters {change}{words}")
    if types:
        yield Cause("modules", f"the model has other modules: {'; '.join(types[:4])}")


def _changed_counts(before: dict[str, int], after: dict[str, int]) -> list[str]:
    return [
        f"{after.get(name, 0)} {name} (was {before.get(name, 0)})"
        for name in {**before, **after}
        if before.get(name, 0) != after.get(name, 0) and name != REST
    ]


def trained_parameters(base: Summary, head: Summary) -> Iterator[Cause]:
    """Reports gradients of fewer or more of the same parameters."""
    if base.parameter_bytes != head.parameter_bytes or not base.parameter_bytes:
        return
    before, after = (side.maxima.get("gradient", 0) for side in (base, head))
    if abs(after - before) < _LEAST_TRAINED * base.parameter_bytes:
        return
    what = "fewer" if after < before else "more"
    yield Cause(
        "gradient",
        f"{what} gradients are live at once, {format_bytes(after)} (was {format_bytes(before)}) for "
        f"{format_bytes(base.parameter_bytes)} of parameters: other parameters are trained, or updated in backward",
    )


def gradients_in_forward(base: Summary, head: Summary) -> Iterator[Cause]:
    """Reports gradients that are live in forward on one side only."""
    shares = []
    for side in (base, head):
        forward = side.spots.get("forward")
        held = 0 if forward is None else forward.parts["category"].get("gradient", 0)
        shares.append(_share(held, side.maxima.get("gradient", 0)))
    if abs(shares[1] - shares[0]) < 0.5:
        return
    yield Cause(
        "gradient",
        "gradients of the previous step are still live in forward: they are zeroed instead of set to None, or cleared "
        "only after it"
        if shares[1] > shares[0]
        else "gradients of the previous step are freed before forward starts",
    )


def held_tensors(base: Traits, head: Traits) -> Iterator[Cause]:
    """Reports forward tensors that are still referenced when the step ends."""
    if change := _tensors_more(base.held, head.held, LEAST_LEAK_BYTES):
        words, lines, grown = change
        yield Cause("held", f"forward tensors still referenced when the step ends: {words}{_made_at(lines)}", grown)


def tensors_outside(base: Summary, head: Summary) -> Iterator[Cause]:
    """Reports tensors that are live over the whole step and belong to neither the model nor the optimizer."""
    least_bytes = max(LEAST_LEAK_BYTES, _LEAST_OUTSIDE * base.peak.bytes)
    if change := _tensors_more(base.traits.outside, head.traits.outside, least_bytes):
        words, shapes, grown = change
        yield Cause(
            "held",
            "tensors live over the whole step, other than parameters, gradients, buffers and optimizer state: "
            f"{words} (shapes such as {', '.join(shapes[:3]) or 'unknown'})",
            grown,
        )


def _tensors_more(
    before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]], least_bytes: float
) -> tuple[str, list[str], int] | None:
    """Returns how many tensors more or fewer there are, in words, their names and bytes; None below a size."""
    more, grown = (sum(one[place] for one in after.values()) for place in (0, 1))
    more -= sum(count for count, _ in before.values())
    grown -= sum(size for _, size in before.values())
    if not more or abs(grown) < least_bytes or grown * more < 0:
        return None
    words = f"{more} more" if more > 0 else f"{-more} fewer"
    names = _names_of_more(after, before) if more > 0 else _names_of_more(before, after)
    return f"{words}, {format_bytes(abs(grown))}", names, grown
