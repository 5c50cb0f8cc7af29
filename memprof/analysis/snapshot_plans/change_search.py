"""Searches for changes under which an imported snapshot's job fits a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, islice

from memprof.analysis.allocator.reserved import reserved_expandable, reserved_under
from memprof.analysis.snapshot_plans.change import Change, PlannedStep, SnapshotPlan, SnapshotPlans
from memprof.analysis.snapshot_plans.layers import Layers, checkpoint_change, find_layers
from memprof.analysis.snapshot_plans.sizes import size_changes
from memprof.analysis.snapshot_plans.updates import update_changes
from memprof.errors import InconclusiveError, PolicyError
from memprof.replay.live import live_bytes
from memprof.trace.manifest import Manifest
from memprof.trace.schema import NONE, Storages, Uses
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.units import format_bytes

#: Plans to show of those that fit, and of those that do not.
_MOST_SHOWN = 8
#: Changes that are combined at most.
_MOST_CHANGES = 3
#: Classes of layers that are tried.
_MOST_CLASSES = 2
#: Activations that are at least this share of the peak are remarked on where nothing uses them.
_NOTABLE = 0.1
#: The order of policies by what they cost a job, the cheapest first.
_CHEAPEST_FIRST = ("loss", "optimizer", "shard", "checkpoint", "accumulate", "precision")


def lacks_operators(trace: Trace) -> bool:
    """Returns whether a recording has allocations and no operators that use them, as imported ones."""
    return bool(len(trace.table(Storages))) and not len(trace.table(Uses))


def search_snapshot(
    trace: Trace,
    planned: PlannedStep,
    budget_bytes: int,
    allow: Sequence[str] = (),
    forbid: Sequence[str] = (),
    world_size: int = 1,
    *,
    counts_reserved: bool = False,
) -> SnapshotPlans:
    """Searches for changes under which a step fits a budget; every combination is replayed as a whole.

    Args:
        trace: The recording.
        planned: Its step to plan for.
        budget_bytes: Most bytes.
        allow: Names of policies to use; empty for all.
        forbid: Names of policies not to use.
        world_size: Number of ranks to shard optimizer state over.
        counts_reserved: What the allocator reserves must fit, too, with expandable segments at the latest.

    Raises:
        InconclusiveError: The recording shows an end state, or sums, instead of allocations in order.
    """
    step = planned.step
    if not (step.storages.created_op_id != NONE).any() or not (step.storages.freed_op_id != NONE).any():
        raise InconclusiveError(
            f"{trace.path} shows what is in use at one moment, without a history of allocations and frees: what a "
            "change saves cannot be replayed. Record a history (docs/import.md), or the job itself with memprof record."
        )
    manifest = trace.manifest

    @cache
    def needed_bytes(plan: SnapshotPlan) -> int:
        reserved = _with_reserved(plan, manifest).needed_reserved if counts_reserved else 0
        return max(plan.bounds[1], reserved)

    def fits(plan: SnapshotPlan) -> bool:
        return plan.fits(budget_bytes) and needed_bytes(plan) <= budget_bytes

    recorded = _with_reserved(SnapshotPlan((), step, int(live_bytes(step).during.max())), manifest)
    path, remark = str(trace.path), planned.remark or _remark_on_graph(recorded)
    if fits(recorded):
        needed = needed_bytes(recorded)
        return SnapshotPlans(
            path, budget_bytes, recorded, True, (), (), (), recorded, needed, 0, remark, is_partial=bool(planned.remark)
        )
    layers = {checkpoint_change(one, len(one.modules)): one for one in find_layers(step)[:_MOST_CLASSES]}
    offered = [*size_changes(), *update_changes(world_size), *layers]
    changes = [one for one in offered if one.policy not in forbid and (not allow or one.policy in allow)]

    @cache
    def alone(change: Change) -> Step:
        return change.transform(step)

    possible, refused = _split(changes, alone)
    if not layers:
        refused.append(("checkpoint layers", _why_no_layers(step)))
    replayed = (_replayed(combined, alone) for combined in _combinations(possible))
    plans = [plan for plan in replayed if plan is not None]
    fitting = list(islice(_minimal(one for one in plans if fits(one)), _MOST_SHOWN))
    if not planned.remark:  # else the rest of the step needs more: as few layers as fit until then would not do
        fitting = [_with_fewest_layers(one, layers, fits, alone) for one in fitting]
    lowest = min((recorded, *plans), key=lambda one: one.bounds[1])
    others = [one for one in plans if len(one.changes) == 1 or one is lowest]
    others = [one for one in others if not fits(one) and one.peak_bytes < recorded.peak_bytes]
    return SnapshotPlans(
        trace=path,
        budget_bytes=budget_bytes,
        recorded=recorded,
        recorded_fits=False,
        fitting=tuple(_with_reserved(one, manifest) for one in fitting),
        others=tuple(sorted(others, key=lambda one: one.peak_bytes)[:_MOST_SHOWN]),
        refused=tuple(refused),
        lowest=lowest,
        needed_bytes=needed_bytes(lowest),
        tried=len(plans),
        remark=remark,
        is_partial=bool(planned.remark),
    )


def _remark_on_graph(recorded: SnapshotPlan) -> str:
    """Returns what may be for nothing: activations that are kept, in a step that shows no backward."""
    kept = recorded.categories.get("activation", 0)
    if (recorded.step.ops.phase == "backward").any() or kept < _NOTABLE * recorded.peak_bytes:
        return ""
    return (
        f"{format_bytes(kept)} of activations are kept for a backward that the snapshot does not show: if none "
        "follows, torch.inference_mode() frees them."
    )


def _split(changes: Sequence[Change], alone: Callable[[Change], Step]) -> tuple[list[Change], list[tuple[str, str]]]:
    """Returns the changes that are possible, the cheapest first, and those that are not, with the reason."""
    possible, refused = [], []
    for change in changes:
        try:
            alone(change)
        except PolicyError as reason:
            refused.append((change.what, str(reason)))
        else:
            possible.append(change)
    return sorted(possible, key=_cost), refused


def _cost(change: Change) -> tuple[bool, int]:
    return change.is_formula, _CHEAPEST_FIRST.index(change.policy)


def _combinations(changes: Sequence[Change]) -> Iterator[tuple[Change, ...]]:
    """Yields changes that can be combined, few and cheap ones first.

    Gradients that backward frees cannot be accumulated.
    """
    for count in range(1, _MOST_CHANGES + 1):
        for combined in combinations(changes, count):
            # Several classes of layers can be checkpointed, and updates in backward have any state.
            kinds = [(one.policy, one.frees_gradients) for one in combined if one.policy != "checkpoint"]
            is_accumulated = any(one.policy == "accumulate" for one in combined)
            is_freed_early = any(one.frees_gradients for one in combined)
            if len(kinds) == len(set(kinds)) and not (is_accumulated and is_freed_early):
                yield combined


def _replayed(changes: tuple[Change, ...], alone: Callable[[Change], Step]) -> SnapshotPlan | None:
    """Returns the recorded step under changes, None where one leaves nothing for another to change.

    Sizes come first, then lives, since changed lives add storages of changed sizes.
    """
    first, *others = sorted(changes, key=lambda change: change.policy == "checkpoint")
    try:
        step = alone(first)
        for change in others:
            step = change.transform(step)
    except PolicyError:
        return None
    return SnapshotPlan(changes, step, int(live_bytes(step).during.max()))


def _minimal(plans: Iterable[SnapshotPlan]) -> Iterator[SnapshotPlan]:
    """Yields plans that do not contain an earlier one, whose other changes are not needed."""
    kept: list[SnapshotPlan] = []
    for one in plans:
        if not any(set(fewer.changes) <= set(one.changes) for fewer in kept):
            kept.append(one)
            yield one


def _with_fewest_layers(
    plan: SnapshotPlan,
    layers: Mapping[Change, Layers],
    fits: Callable[[SnapshotPlan], bool],
    alone: Callable[[Change], Step],
) -> SnapshotPlan:
    """Returns a plan that checkpoints as few layers as fit; one that checkpoints none, unchanged.

    Args:
        plan: A plan that fits.
        layers: The layers that each change to all layers of a class checkpoints.
        fits: Returns whether a plan fits.
        alone: Returns the recorded step under one change.
    """
    for place, change in enumerate(plan.changes):
        one = layers.get(change)
        if one is None:
            continue
        least, most = 1, len(one.modules)
        while least < most:
            middle = (least + most) // 2
            fewer = list(plan.changes)
            fewer[place] = checkpoint_change(one, middle)
            tried = _replayed(tuple(fewer), alone)
            if tried is not None and fits(tried):
                plan, most = tried, middle
            else:
                least = middle + 1
    return plan


def _with_reserved(plan: SnapshotPlan, manifest: Manifest) -> SnapshotPlan:
    return replace(
        plan,
        reserved_bytes=reserved_under(plan.step, manifest),
        expandable_bytes=reserved_expandable(plan.step, manifest),
    )


def _why_no_layers(step: Step) -> str:
    if not len(step.modules):
        return "the stacks show no modules: record Python stacks, and do not compile the model."
    return "no module of the stacks is called several times in turn and keeps memory for backward."
