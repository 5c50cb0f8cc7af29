"""A step built from arrays, for graphs without a recording."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memprof.errors import UsageError
from memprof.trace.schema import NONE, Memory, ModuleCalls, Modules, Ops, Saved, Stacks, Storages, Uses
from memprof.trace.step import Step


def step_from_arrays(
    *,
    time_us: Sequence[float],
    output_bytes: Sequence[int],
    inputs: Sequence[Sequence[int]],
    is_backward: Sequence[bool],
    workspace_bytes: Sequence[int] | None = None,
    in_place: Sequence[int] | None = None,
    view_of: Sequence[int] | None = None,
    uses_rng: Sequence[bool] | None = None,
    names: Sequence[str] | None = None,
    fixed_bytes: int = 0,
) -> Step:
    """Builds a step from one entry per operator, in run order.

    Operator *i* makes one output, read by the operators that list *i* among their inputs. The forward outputs that a
    backward operator lists are the tensors saved for backward. An output is freed after its last reader; the last
    operator's output is never freed. ``find_plan(step_from_arrays(...), budget_bytes)`` plans for it.

    Args:
        time_us: Duration of each operator, in microseconds.
        output_bytes: Bytes of its output; ignored for views and operators that work in place.
        inputs: The operators whose outputs it reads; each must precede it.
        is_backward: Whether it is a backward operator; those never run again.
        workspace_bytes: Workspace it holds while it runs; 0 for all if omitted.
        in_place: The operator whose output it modifies, -1 where it makes its own. No later operator may read the
            unmodified output.
        view_of: The operator whose output it returns a view of, -1 where it makes its own.
        uses_rng: Whether it draws random numbers.
        names: Operator names.
        fixed_bytes: Bytes allocated throughout the step: parameters, gradients, optimizer state.

    Returns:
        The step, which satisfies ``Step.check``.

    Raises:
        UsageError: The arrays differ in length, or refer to operators that have not run yet.
    """
    count = len(time_us)
    columns = {"output_bytes": output_bytes, "inputs": inputs, "is_backward": is_backward}
    optional = {
        "workspace_bytes": workspace_bytes,
        "in_place": in_place,
        "view_of": view_of,
        "uses_rng": uses_rng,
        "names": names,
    }
    for name, column in {**columns, **optional}.items():
        if column is not None and len(column) != count:
            raise UsageError(f"{name} has {len(column)} entries, time_us has {count}: give one per operator.")
    if any(not time >= 0 for time in time_us) or any(size < 0 for size in output_bytes) or fixed_bytes < 0:
        raise UsageError("times and bytes must not be negative or NaN.")
    changed = list(in_place) if in_place is not None else [NONE] * count
    viewed = list(view_of) if view_of is not None else [NONE] * count

    base, uses_of_outputs = _uses(inputs, changed, viewed)
    owners = np.flatnonzero(np.array(base) == np.arange(count))
    row = np.full(count + 1, NONE)
    row[owners] = np.arange(len(owners)) + 1
    last = np.arange(count)
    np.maximum.at(last, uses_of_outputs.storage_id, uses_of_outputs.op_id)
    freed = last[owners]
    backward = np.asarray(is_backward, dtype=np.bool_)
    ops = Ops.of(
        op_id=np.arange(count),
        phase=np.where(backward, "backward", "forward"),
        name=list(names) if names is not None else [f"op{op_id}" for op_id in range(count)],
        kind=np.full(count, "compute"),
        duration_us=time_us,
        uses_rng=list(uses_rng) if uses_rng is not None else np.zeros(count),
        mutates=np.array(changed) != NONE,
        workspace_bytes=list(workspace_bytes) if workspace_bytes is not None else np.zeros(count),
    )
    sizes = np.asarray(output_bytes, dtype=np.int64)[owners]
    storages = Storages.of(
        storage_id=np.arange(len(owners) + 1),
        category=["parameter", *np.where(backward[owners], "temporary", "activation")],
        requested_bytes=np.append(fixed_bytes, sizes),
        allocated_bytes=np.append(fixed_bytes, sizes),
        created_op_id=np.append(NONE, owners),
        freed_op_id=np.append(NONE, np.where(freed == count - 1, NONE, freed)),
    )
    uses = uses_of_outputs.replace(storage_id=row[uses_of_outputs.storage_id])
    step = Step(
        number=0,
        duration_us=float(np.sum(time_us)),
        modules=Modules.empty(),
        module_calls=ModuleCalls.empty(),
        stacks=Stacks.empty(),
        ops=ops,
        storages=storages,
        uses=uses,
        saved=_saved(uses, backward, storages),
        memory=Memory.empty(),
        first_op_id=0,
        storage_ids=np.arange(len(storages)),
    )
    step.check()
    return step


def _uses(inputs: Sequence[Sequence[int]], changed: list[int], viewed: list[int]) -> tuple[list[int], Uses]:
    """Lists what each operator reads, makes and changes.

    Args:
        inputs: The operators whose outputs each reads.
        changed: The operator whose output each modifies, NONE where it makes its own.
        viewed: The operator whose output each returns a view of, NONE where it makes its own.

    Returns:
        The operator that allocated each operator's output, and the uses; their ``storage_id`` is that operator.

    Raises:
        UsageError: An operator reads one that has not run yet, or is both a view and in place.
    """
    base = list(range(len(changed)))
    rows: list[tuple[int, int, str]] = []
    for op_id, (target, seen) in enumerate(zip(changed, viewed, strict=True)):
        for other in (*inputs[op_id], *(one for one in (target, seen) if one != NONE)):
            if not 0 <= other < op_id:
                raise UsageError(f"operator {op_id} reads the output of operator {other}, which has not run yet.")
        if NONE not in (target, seen):
            raise UsageError(f"operator {op_id} is both a view and in place: give one of them.")
        read = {base[other] for other in inputs[op_id]}
        if seen != NONE:
            base[op_id] = base[seen]
            read.add(base[op_id])
        if target != NONE:
            base[op_id] = base[target]
            read.discard(base[op_id])
        rows += [(op_id, storage, "read") for storage in sorted(read)]
        if target != NONE:
            rows.append((op_id, base[op_id], "mutate"))
        elif seen == NONE:
            rows.append((op_id, op_id, "write"))
    op_ids, storages, roles = zip(*rows, strict=True) if rows else ((), (), ())
    return base, Uses.of(op_id=op_ids, storage_id=storages, role=roles)


def _saved(uses: Uses, backward: np.ndarray, storages: Storages) -> Saved:
    """Lists the values that forward makes and backward reads, as saved by the operator that made them."""
    created = storages.created_op_id[uses.storage_id]
    late = backward[uses.op_id] & (created != NONE)
    late[late] = ~backward[created[late]]
    storage_ids = np.unique(uses.storage_id[late])
    released = np.full(len(storages), NONE)
    np.maximum.at(released, uses.storage_id[late], uses.op_id[late])
    order = np.argsort(storages.created_op_id[storage_ids], kind="stable")
    storage_ids = storage_ids[order]
    return Saved.of(
        storage_id=storage_ids,
        forward_op_id=storages.created_op_id[storage_ids],
        module_id=np.full(len(storage_ids), NONE),
        released_op_id=released[storage_ids],
    )
