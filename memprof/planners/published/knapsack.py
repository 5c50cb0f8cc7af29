"""Packs the saved values that are most expensive to recompute into a number of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memprof.planners.base import Planner, ScheduleRequest, ScheduleResult
from memprof.planners.graph.choices import Choices
from memprof.planners.graph.graph import Graph
from memprof.planners.graph.recomputation import Recomputation, gone_after_forward
from memprof.planners.graph.schedule import replay
from memprof.planners.graph.writing import Demand
from memprof.trace.schema import NONE, Bools, Floats, Ints

#: Cells into which the total saved bytes are divided; sizes are rounded to the nearest cell.
_CELLS = 2048
#: Maximum number of saved-bytes budgets replayed, for each kind of item and of solution.
_MOST_BUDGETS = 96


@dataclass(frozen=True, eq=False)
class Items:
    """The items kept or dropped: single saved values, or all values of one operator together.

    Attributes:
        item_of_value: The item of each value of the graph, NONE for values that are not optional, shape ``(values,)``.
        cost_us: Recompute time, given that other saved values are live, shape ``(items,)``.
        size_bytes: Bytes of each item, shape ``(items,)``.
    """

    item_of_value: Ints
    cost_us: Floats
    size_bytes: Ints


class Knapsack(Planner):
    """Chooses what to keep as a 0/1 knapsack: the value of an item is its recompute time, its weight its bytes.

    The peak of a step is not the sum of its saved bytes, so the budget for saved bytes does not follow from the budget
    for the peak: a list of them is solved and replayed to see which fit. The list does not depend on the peak budget,
    so a larger budget is never slower, unlike with PyTorch's own option.
    """

    name: ClassVar[str] = "knapsack"
    source: ClassVar[str] = (
        "PyTorch, torch/_functorch/_activation_checkpointing/knapsack.py (dp_knapsack and greedy_knapsack of the "
        "activation memory budget), 2024"
    )
    summary: ClassVar[str] = "keeps the saved tensors most expensive to recompute, as a 0/1 knapsack"

    def search(self, task: ScheduleRequest) -> ScheduleResult:
        """Solves the knapsack for a list of sizes and returns the fastest schedule that fits."""
        choices = Choices(task)
        if choices.is_met:
            return choices.met()
        graph, demand, saved, seen = task.graph, Demand(task.graph), task.graph.is_saved(), set()
        for is_together in (False, True):
            items = items_of(graph, is_together=is_together)
            for kept, how in _packed(items):
                if choices.is_late():
                    return choices.found()
                dropped = _dropped(graph, items, kept)
                if (key := dropped.tobytes()) not in seen:
                    seen.add(key)
                    many = f"{int((saved & ~dropped).sum())} of {int(saved.sum())} saved values"
                    of = "one item per operator" if is_together else "one item per value"
                    done = replay(graph, demand.schedule(dropped))
                    choices.add(done, f"keeps {many} ({how}, {of})")
        return choices.found()


def items_of(graph: Graph, *, is_together: bool) -> Items:
    """Computes the recompute cost of each saved value.

    Args:
        graph: The step.
        is_together: Whether the values of one operator are one item, since recomputing one recomputes all. Separately,
            each costs the whole operator, which overestimates where several are dropped.
    """
    saved = np.flatnonzero(graph.is_saved())
    key = graph.value_op[saved] if is_together else saved
    _, first, item = np.unique(key, return_index=True, return_inverse=True)
    size = np.zeros(len(first), dtype=np.int64)
    np.add.at(size, item, graph.value_bytes[saved])
    remaking = Recomputation(graph)
    cost = np.array([remaking.added_us(value) for value in saved[first].tolist()], dtype=np.float64)
    item_of_value = np.full(graph.values, NONE)
    item_of_value[saved] = item
    return Items(item_of_value=item_of_value, cost_us=cost, size_bytes=size)


def pack_exactly(cost: Floats, cells: Ints, capacity: int) -> Bools:
    """Solves a 0/1 knapsack for every capacity at once.

    Args:
        cost: Value of each item, shape ``(items,)``.
        cells: Weight of each item, integers from 0.
        capacity: The largest capacity.

    Returns:
        Which items are packed, shape ``(capacity + 1, items)``: a row for each capacity.
    """
    best = np.zeros(capacity + 1)
    is_in = np.zeros((len(cost), capacity + 1), dtype=np.bool_)
    for item, (worth, weight) in enumerate(zip(cost.tolist(), cells.tolist(), strict=True)):
        if weight > capacity:
            continue
        with_it = best[: capacity + 1 - weight] + worth
        is_better = with_it >= best[weight:]
        is_in[item, weight:] = is_better
        best[weight:] = np.where(is_better, with_it, best[weight:])
    chosen = np.zeros((capacity + 1, len(cost)), dtype=np.bool_)
    left = np.arange(capacity + 1)
    for item in reversed(range(len(cost))):
        chosen[:, item] = is_in[item, left]
        left = left - np.where(chosen[:, item], cells[item], 0)
    return chosen


def pack_greedily(cost: Floats, size_bytes: Ints, capacity_bytes: float) -> Bools:
    """Packs a 0/1 knapsack by value per byte, skipping items that do not fit."""
    chosen = np.zeros(len(cost), dtype=np.bool_)
    left = capacity_bytes
    for item in np.lexsort((-size_bytes, -cost / np.maximum(size_bytes, 1))).tolist():
        if size_bytes[item] <= left:
            chosen[item] = True
            left -= size_bytes[item]
    return chosen


def _packed(items: Items) -> Iterator[tuple[Bools, str]]:
    """Yields what is kept for each saved-bytes budget and how it was found, largest budget first."""
    total = int(items.size_bytes.sum())
    if not total:
        return
    # A unit of one byte is exact where totals are small; the replay corrects rounding errors.
    unit = max(int(np.gcd.reduce(items.size_bytes)), total / _CELLS)
    cells = np.rint(items.size_bytes / unit).astype(np.int64)
    exact = pack_exactly(items.cost_us, cells, int(cells.sum()))
    is_new = np.append(True, np.any(exact[1:] != exact[:-1], axis=1))
    rows = np.flatnonzero(is_new)[::-1]
    for row in rows[np.unique(np.linspace(0, len(rows) - 1, _MOST_BUDGETS).astype(np.int64))].tolist():
        yield exact[row], "exact knapsack"
    for share in np.linspace(1, 0, _MOST_BUDGETS).tolist():
        yield pack_greedily(items.cost_us, items.size_bytes, share * total), "greedy knapsack"


def _dropped(graph: Graph, items: Items, kept: Bools) -> Bools:
    is_chosen = items.item_of_value != NONE
    dropped: Bools = gone_after_forward(graph) | (is_chosen & ~np.append(kept, True)[items.item_of_value])
    return dropped
