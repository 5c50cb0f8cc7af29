"""Known causes of memory, each found in one step: how many bytes it takes, and what a maintainer would write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from memprof.analysis.report.sources import Sources
from memprof.replay.live import alive_at
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step
from memprof.units import format_bytes

#: A cause is named if it takes at least this share of the peak.
_LEAST_SHARE = 0.03
#: An operand was expanded if its copy has at least this multiple of its bytes.
_EXPANDED = 2
#: Operators that view a tensor, or copy it, between the expansion of an operand and its use.
_PRODUCTS = ("aten.bmm.default", "aten.baddbmm.default")


def find_causes(step: Step, sources: Sources, peak_op: int, peak_bytes: int) -> tuple[str, ...]:
    """Returns a sentence for each known cause that takes a noticeable share of the peak.

    Args:
        step: The step.
        sources: Source lines of its stacks.
        peak_op: Operator at the peak.
        peak_bytes: Bytes at the peak.
    """
    least = max(1, int(_LEAST_SHARE * peak_bytes))
    return (*_expanded_operands(step, sources, least), *_weight_copies(step, peak_op, least))


def _rows(step: Step) -> dict[int, int]:
    return {storage: row for row, storage in enumerate(step.storages.storage_id.tolist())}


def _used(step: Step, op: int, *, is_read: bool) -> Ints:
    own = slice(*np.searchsorted(step.uses.op_id, [op, op + 1]).tolist())
    some: Ints = step.uses.storage_id[own][(step.uses.role[own] == "read") == is_read]
    return some


def _expanded_operands(step: Step, sources: Sources, least: int) -> Iterator[str]:
    """Finds operands that matmul expands and copies: a clone of more bytes than it reads, read by a batched product."""
    ops, storages, rows = step.ops, step.storages, _rows(step)
    sizes, found = storages.allocated_bytes, Counter[tuple[str, int, int]]()
    for op in np.flatnonzero((ops.name == "aten.clone.default") & (ops.phase == "forward")).tolist():
        read = [rows[one] for one in _used(step, op, is_read=True).tolist() if one in rows]
        made = [rows[one] for one in _used(step, op, is_read=False).tolist() if one in rows]
        if len(read) != 1 or len(made) != 1 or sizes[made[0]] < max(_EXPANDED * sizes[read[0]], least):
            continue
        # In one call of matmul: the expansion just before, the product just after, all from one stack.
        near = slice(op + 1, op + 6)
        alike = (ops.stack_id[near] == ops.stack_id[op]) & np.isin(ops.name[near], _PRODUCTS)
        is_expanded = op > 0 and ops.name[op - 1] == "aten.expand.default" and ops.stack_id[op - 1] == ops.stack_id[op]
        product = op + 1 + int(np.argmax(alike)) if alike.any() else NONE
        if is_expanded and product != NONE and storages.storage_id[made[0]] in _used(step, product, is_read=True):
            line = sources.of_stack(int(ops.stack_id[op]))
            place = "" if line is None else line.place
            found[place, int(sizes[made[0]]), int(sizes[read[0]])] += 1
    for (place, size, own), count in found.items():
        times = f" in each of {count} products" if count > 1 else ""
        yield (
            f"matmul{place and f' at {place}'} expands an operand of {format_bytes(own)} and copies it: "
            f"{format_bytes(size)}{times}, and as much for its gradient; torch.einsum, or torch.bmm over another "
            "dimension, needs no copy."
        )


def _weight_copies(step: Step, peak_op: int, least: int) -> Iterator[str]:
    """Finds the copies of weights in another type that autocast keeps from forward on."""
    ops, storages, rows = step.ops, step.storages, _rows(step)
    alive = np.flatnonzero(alive_at(step, peak_op) & (storages.created_op_id != NONE))
    created = storages.created_op_id[alive]
    copies = alive[(ops.name[created] == "aten._to_copy.default") & (ops.phase[created] == "forward")]
    size, weights = 0, Counter[int]()
    for row in copies.tolist():
        read = [rows[one] for one in _used(step, int(storages.created_op_id[row]), is_read=True) if one in rows]
        is_weight = len(read) == 1 and storages.category[read[0]] == "parameter"
        if is_weight and storages.dtype[row] != storages.dtype[read[0]]:
            size += int(storages.allocated_bytes[row])
            weights[read[0]] += 1
    again = weights.total() - len(weights)
    which, remedy = "copies", "weights of that type (model.to(torch.bfloat16)) need no second copy"
    if again:  # autocast's cache has one of each
        which, remedy = f"{weights.total()} copies", "autocast keeps one of each unless cache_enabled is False"
    number = "1 weight" if len(weights) == 1 else f"{len(weights)} weights"
    if size >= least:
        yield (
            f"{format_bytes(size)} at the peak are {which} of {number} in another type that forward makes, "
            f"as autocast does; {remedy}."
        )
