"""Known causes of memory, each found in one step: how many bytes it takes, and what a maintainer would write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from memprof.analysis.report.saved import find_saved
from memprof.analysis.report.sources import Sources
from memprof.replay.live import alive_at
from memprof.trace.operator_facts import BATCHED_PRODUCTS, CAST, CAT, CLONE, EXPAND, TRANSFERS, are_among
from memprof.trace.schema import NONE, Bools, Holders, Ints
from memprof.trace.step import Step
from memprof.trace.usages import COLLECTOR_OFF, IDLE_CHECKPOINTS, modules_in
from memprof.units import format_bytes, format_count

#: A cause is named if it takes at least this share of the peak.
_LEAST_SHARE = 0.05
#: An operand was expanded if its copy has at least this multiple of its bytes.
_EXPANDED = 2
#: A vmap is too wide if this share of the peak dies as it ends: results, such as gradients of each sample, stay.
_PASSING = 0.25
#: What training keeps from step to step.
_KEPT = ("parameter", "buffer", "gradient", "optimizer_state", "workspace", "collective")
#: Functions of torch: one call for a whole batch, one per chunk, what begins a Jacobian and what joins its chunks.
_WHOLE, _CHUNK, _BASIS, _JOIN = ":_flat_vmap", ":_chunked_vmap", ":_chunked_standard_basis_for_", ":compute_jacobian_"


def find_causes(step: Step, sources: Sources, holders: Holders, peak_op: int, peak_bytes: int) -> tuple[str, ...]:
    """Returns a sentence for each known cause that takes a noticeable share of the peak."""
    least = max(1, int(_LEAST_SHARE * peak_bytes))
    alive = alive_at(step, peak_op)
    causes = (
        *_weight_copies(step, alive),
        *_cycles(step, holders, alive),
        *_whole_batches(step, sources, alive, peak_op),
        *_buckets(step, alive),
        *_moved_weights(step),
        *_idle_checkpoints(step, peak_op),
    )
    return (
        *_expanded_operands(step, sources, least),
        *(f"{format_bytes(size)} {text}" for size, text in causes if size >= least),
    )


def _used(step: Step, op: int, *, is_read: bool) -> list[int]:
    own = slice(*np.searchsorted(step.uses.op_id, [op, op + 1]).tolist())
    some: Ints = step.uses.storage_id[own][(step.uses.role[own] == "read") == is_read]
    return [row for row in some.tolist() if row != NONE]


def _expanded_operands(step: Step, sources: Sources, least: int) -> Iterator[str]:
    """Finds operands that matmul expands and copies: a clone of more bytes than it reads, read by a batched product."""
    ops, sizes = step.ops, step.storages.allocated_bytes
    found = Counter[tuple[str, int, int]]()
    for op in np.flatnonzero((ops.name == CLONE) & (ops.phase == "forward")).tolist():
        read, made = _used(step, op, is_read=True), _used(step, op, is_read=False)
        if len(read) != 1 or len(made) != 1 or sizes[made[0]] < max(_EXPANDED * sizes[read[0]], least):
            continue
        # In one call of matmul: the expansion just before, the product just after, all from one stack.
        near = slice(op + 1, op + 6)
        alike = (ops.stack_id[near] == ops.stack_id[op]) & are_among(ops.name[near], BATCHED_PRODUCTS)
        is_expanded = op > 0 and ops.name[op - 1] == EXPAND and ops.stack_id[op - 1] == ops.stack_id[op]
        product = op + 1 + int(np.argmax(alike)) if alike.any() else NONE
        if is_expanded and product != NONE and made[0] in _used(step, product, is_read=True):
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


def _weight_copies(step: Step, alive: Bools) -> Iterator[tuple[int, str]]:
    """Finds the copies of weights in another type that autocast keeps from forward on."""
    ops, storages = step.ops, step.storages
    rows = np.flatnonzero(alive & (storages.created_op_id != NONE))
    created = storages.created_op_id[rows]
    copies = rows[(ops.name[created] == CAST) & (ops.phase[created] == "forward")]
    size, weights = 0, Counter[int]()
    for row in copies.tolist():
        read = _used(step, int(storages.created_op_id[row]), is_read=True)
        is_weight = len(read) == 1 and storages.category[read[0]] == "parameter"
        if is_weight and storages.dtype[row] != storages.dtype[read[0]]:
            size += int(storages.allocated_bytes[row])
            weights[int(read[0])] += 1
    count, number = weights.total(), format_count(len(weights), "weight")
    which, remedy = f"copies of {number}", "weights of that type (model.to(torch.bfloat16)) need no second copy"
    if count > len(weights):  # autocast's cache has one of each
        which, remedy = f"{count} copies of {number}", "autocast keeps one of each unless cache_enabled is False"
    yield size, f"at the peak are {which} in another type that forward makes, as autocast does; {remedy}."


def _cycles(step: Step, holders: Holders, alive: Bools) -> Iterator[tuple[int, str]]:
    """Finds tensors of earlier steps that nothing but reference cycles holds while Python's collector is off."""
    storages = step.storages
    if COLLECTOR_OFF not in step.usages:
        return
    old = alive & (storages.created_op_id == NONE) & ~np.isin(storages.category, _KEPT)
    followed = holders.take((holders.tensors > 0) & (holders.storage_id != NONE))
    rows = np.minimum(np.searchsorted(step.storage_ids, followed.storage_id), len(old) - 1)
    is_here = (step.storage_ids[rows] == followed.storage_id) & old[rows]
    rows, kind = rows[is_here], followed.kind[is_here]
    size = 0
    # Only examples are followed. Where all of a shape are in cycles, so are the others.
    for shape, dtype in {(storages.shape[row], storages.dtype[row]) for row in rows.tolist()}:
        is_alike = (storages.shape == shape) & (storages.dtype == dtype)
        held = kind[is_alike[rows]] == "cycle"
        size += (
            int(storages.allocated_bytes[old & is_alike].sum())
            if held.all()
            else int(storages.allocated_bytes[np.unique(rows[is_alike[rows]][held])].sum())
        )
    yield (
        size,
        (
            "at the peak are tensors of earlier steps that only reference cycles hold while Python's garbage collector "
            "is off, or rare: gc.enable(), or gc.collect() every few steps, frees them; without the cycle, which "
            "`memprof report --leaks` names, they would die at once."
        ),
    )


def _whole_batches(step: Step, sources: Sources, alive: Bools, peak_op: int) -> Iterator[tuple[int, str]]:
    """Finds what a vmap without `chunk_size`, as of jacrev, holds only while it runs."""
    ops, storages = step.ops, step.storages
    frames = np.array(["", *step.stacks.frames.tolist()], dtype=object)[ops.stack_id + 1]
    begins = np.array([_WHOLE in each or _BASIS in each for each in frames], dtype=np.bool_)
    # Operators of backward have the stacks of forward: they belong to what called the engine, just before them.
    caller = np.maximum.accumulate(np.where(ops.forward_op_id == NONE, np.arange(len(ops)), 0))
    inside = begins[caller]
    if not inside[peak_op] or _CHUNK in frames[caller[peak_op]]:
        return
    outside = np.flatnonzero(~inside)
    place = int(np.searchsorted(outside, peak_op))
    first = int(outside[place - 1]) + 1 if place else 0
    last = int(outside[place]) - 1 if place < len(outside) else len(ops) - 1
    line = sources.of_stack(int(ops.stack_id[caller[peak_op]]))
    joins = ~inside & (ops.name == CAT) & [_JOIN in each for each in frames]
    if any(sources.of_stack(stack) == line for stack in ops.stack_id[joins].tolist()):
        return
    freed = storages.freed_op_id
    rows = alive & (storages.created_op_id >= first) & (freed != NONE) & (freed <= last)
    size = int(storages.allocated_bytes[rows].sum())
    if size < _PASSING * int(storages.allocated_bytes[alive].sum()):
        return
    yield (
        size,
        (
            f"at the peak are held only while a vmap{'' if line is None else f' at {line.place}'} runs, for its whole "
            "batch at once: jacrev or vmap with chunk_size=n takes n rows at a time."
        ),
    )


def _buckets(step: Step, alive: Bools) -> Iterator[tuple[int, str]]:
    """Finds gradients that lie beside the buckets of DistributedDataParallel."""
    storages, uses = step.storages, step.uses
    if not np.any(step.modules.type == "DistributedDataParallel"):
        return
    uses = uses.take(uses.storage_id != NONE)
    category = storages.category[uses.storage_id]
    copies = uses.op_id[(uses.role == "mutate") & (category == "collective")]
    copied = np.unique(uses.storage_id[(uses.role == "read") & (category == "gradient") & np.isin(uses.op_id, copies)])
    yield (
        int(storages.allocated_bytes[copied[alive[copied]]].sum()),
        (
            "of gradients lie beside DistributedDataParallel's buckets, which hold them once more: "
            "gradient_as_bucket_view=True keeps them in the buckets alone."
        ),
    )


def _moved_weights(step: Step) -> Iterator[tuple[int, str]]:
    """Finds weights among what hooks of the job, such as save_on_cpu, move to the host for backward."""
    ops, storages, sizes = step.ops, step.storages, dict[int, int]()
    is_host = storages.device == "cpu"
    is_weight = (storages.category == "parameter") & ~is_host
    is_copy = are_among(ops.name, TRANSFERS)
    for op in np.flatnonzero(is_copy & ops.is_hooked & (ops.phase == "forward")).tolist():
        read, made = _used(step, op, is_read=True), _used(step, op, is_read=False)
        if len(read) == len(made) == 1 and is_weight[read[0]] and is_host[made[0]]:
            sizes[read[0]] = int(storages.requested_bytes[made[0]])
    yield (
        sum(sizes.values()),
        (
            f"of {format_count(len(sizes), 'weight')} go to the host in forward, as save_on_cpu moves all that "
            "backward reads, and come back beside the weights themselves: hooks that return parameters, and views of "
            "them, as they are move activations alone."
        ),
    )


def _idle_checkpoints(step: Step, peak_op: int) -> Iterator[tuple[int, str]]:
    """Finds what modules keep whose gradient checkpointing is switched on, and off in evaluation mode."""
    modules = modules_in(step.usages, IDLE_CHECKPOINTS)
    below = set(modules)
    for module, parent in zip(step.modules.module_id.tolist(), step.modules.parent_id.tolist(), strict=True):
        if parent in below:  # parents come before their children
            below.add(module)
    saved = find_saved(step)
    kept = saved.kept_at(peak_op)
    yield (
        int(saved.bytes[kept][np.isin(saved.module_id[kept], list(below))].sum()),
        (
            f"at the peak are activations of {format_count(len(modules), 'module')} in eval mode whose gradient "
            "checkpointing is switched on, and does nothing there: call model.train() (with dropout 0), or use "
            "memprof's checkpoint."
        ),
    )
