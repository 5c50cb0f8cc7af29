"""Inserts casts: operators, the storages they allocate, and the resulting changes in lifetime.

What the job's code casts to float32 before a product, as ``x.to(self.down.weight.dtype)`` before ``self.down(x)``,
autocast casts back; in a step recorded in float32 neither leaves an operator.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.precision.autocast_lists import SHORT
from memprof.policies.precision.float32 import calls_of_code
from memprof.policies.rewrite.views_read import bytes_read
from memprof.replay.rounding import rounded
from memprof.trace.schema import NONE, Bools, Ints, Ops

if TYPE_CHECKING:
    from memprof.policies.precision.ends import Nodes
    from memprof.policies.precision.flow import Types
    from memprof.policies.precision.times import Rates
    from memprof.policies.rewrite.draft import Draft
    from memprof.trace.step import Step


@dataclass(eq=False)
class Casts:
    """A step being rewritten, and the casts inserted so far.

    Attributes:
        step: The recorded step.
        types: The types in it.
        nodes: Ends of its backward nodes and module calls.
        draft: The rewritten step.
        short: Name of the short type in the trace.
        rates: Memory throughput.
        freed: Operator after which each recorded storage is freed, in ids of the draft.
    """

    step: Step
    types: Types
    nodes: Nodes
    draft: Draft
    short: str
    rates: Rates
    freed: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Copies the recorded lifetimes."""
        self.freed = self.step.storages.freed_op_id.copy()

    def insert(
        self,
        sources: Ints,
        before: Ints,
        like: Ints,
        *,
        to_short: Bools,
        freed: Ints,
        category: str,
        name: str = "aten._to_copy.default",
        read: Ints | None = None,
        sizes: Ints | None = None,
    ) -> tuple[Ints, Ints]:
        """Inserts one cast for each source.

        Args:
            sources: Recorded storages to cast, which determine shape and size.
            before: Recorded operators before which the casts run.
            like: Recorded operators whose module, phase and node the casts take.
            to_short: Whether they cast to the short type, else to float32.
            freed: When the result is freed; NONE for right after the cast.
            category: Category of the result.
            name: The operator.
            read: Storages read instead of the sources, in ids of the draft.
            sizes: Bytes of the cast part in float32, where it is not the whole source.

        Returns:
            The operators and the storages, in ids of the draft.
        """
        step = self.step
        whole = step.storages.requested_bytes[sources] if sizes is None else sizes
        written = np.where(to_short, whole // 2, whole)
        rows = step.ops.take(like)
        moved = whole + whole // 2
        ops = self.draft.insert_ops(
            Ops(
                **{
                    **vars(rows),
                    "name": np.full(len(rows), name, dtype=object),
                    "kind": np.full(len(rows), "compute", dtype=object),
                    "duration_us": self.rates.cast_us(moved),
                    "flops": np.zeros(len(rows), dtype=np.int64),
                    "read_bytes": moved - written,
                    "written_bytes": written,
                    "uses_rng": np.zeros(len(rows), dtype=np.bool_),
                    "mutates": np.zeros(len(rows), dtype=np.bool_),
                    "workspace_bytes": np.zeros(len(rows), dtype=np.int64),
                }
            ),
            before,
        )
        like_storages = step.storages.take(sources)
        storages = self.draft.insert_storages(
            like_storages.replace(
                category=np.full(len(ops), category, dtype=object),
                name=np.full(len(ops), "", dtype=object),
                module_id=rows.module_id,
                requested_bytes=written,
                allocated_bytes=rounded(written, like_storages.device),
                created_op_id=ops,
                freed_op_id=np.where(freed == NONE, ops, freed),
                dtype=np.where(to_short, self.short, "float32").astype(object),
            )
        )
        self.draft.use(ops, sources if read is None else read, "read")
        self.draft.use(ops, storages, "write")
        return ops, storages

    def redirect(self, rows: Ints, storages: Ints) -> None:
        """Redirects uses, given by their rows in the recorded step, to other storages."""
        changed = self.draft.uses.storage_id.copy()
        changed[rows] = storages
        self.draft.uses = self.draft.uses.replace(storage_id=changed)

    def free(self, storages: Ints, after: Ints) -> None:
        """Changes when recorded storages are freed."""
        self.freed[storages] = after

    def settle(self) -> None:
        """Writes the lifetimes of the recorded storages into the draft."""
        self.draft.free(self.step.storages.storage_id, self.freed)


def cast_twice(casts: Casts) -> Bools:
    """Returns which reads of products are of short tensors that the job's code casts to float32, and autocast back.

    Returns:
        One flag for each use, ``(uses,)``.
    """
    types, uses = casts.types, casts.step.uses
    created = casts.step.storages.created_op_id[uses.storage_id]
    is_twice: Bools = types.is_given[uses.op_id] & (types.rule[uses.op_id] == SHORT) & (uses.role == "read")
    is_twice &= (created != NONE) & ~types.is_given[created]
    return is_twice & types.is_float[uses.storage_id] & types.is_short[uses.storage_id]


def cast_by_code(casts: Casts, sources: Ints, ops: Ints, to_short: Bools) -> tuple[Ints, Ints]:
    """Inserts the float32 copies that autocast casts back; a variable of the code holds them until its function ends.

    Args:
        casts: The step being rewritten.
        sources: Storages that are cast.
        ops: Their readers, in order.
        to_short: Whether they are cast to the short type.

    Returns:
        What these casts read, in ids of the draft; and the operators that copy the sources, NONE for the rest.
    """
    read, copied_by = sources.copy(), np.full(len(sources), NONE, dtype=np.int64)
    rows = np.flatnonzero(to_short & casts.types.is_short[sources])
    if not len(rows):
        return read, copied_by
    before = ops[rows]
    call, held = calls_of_code(casts.step, before, casts.nodes.innermost)
    # One copy of each source in a call of the code.
    keys = sources[rows] * (len(casts.step.module_calls) + 1) + call + 1
    _, first, copy_of = np.unique(keys, return_index=True, return_inverse=True)
    ends = np.full(len(first), NONE, dtype=np.int64)
    np.maximum.at(ends, copy_of, np.maximum(held, before))
    sizes = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(sizes, copy_of, bytes_read(casts.step, sources[rows], before))
    made_by, copies = casts.insert(
        sources[rows][first],
        before[first],
        before[first],
        to_short=np.zeros(len(first), dtype=np.bool_),
        freed=ends,
        category="temporary",
        sizes=sizes,
    )
    copied_by[rows], read[rows] = made_by[copy_of], copies[copy_of]
    return read, copied_by


def free_with_copies(casts: Casts, sources: Ints, ops: Ints, copied_by: Ints) -> None:
    """Frees what such a copy replaces: a source that was made in the same call, and that nothing else reads.

    Args:
        casts: The step being rewritten, after the casts read the copies.
        sources: Storages that are cast.
        ops: Their readers, as many.
        copied_by: The operators that copy them, NONE for none.
    """
    step, uses, count = casts.step, casts.step.uses, len(casts.step.ops)
    rows = np.flatnonzero(copied_by != NONE)
    if not len(rows):
        return
    of, before = sources[rows], ops[rows]
    call, held = calls_of_code(step, before, casts.nodes.innermost)
    begin = np.full(len(step.storages), count, dtype=np.int64)
    np.minimum.at(begin, of, before)
    is_other = (casts.types.forward[uses.op_id] == NONE) & (uses.op_id >= begin[uses.storage_id])
    is_other &= ~np.isin(uses.storage_id * count + uses.op_id, of * count + before)
    is_local = (call != NONE) & (step.storages.created_op_id[of] >= step.module_calls.first_op_id[call])
    is_local &= ~np.isin(of, uses.storage_id[is_other])
    is_local &= (casts.freed[of] != NONE) & (casts.freed[of] <= held)
    casts.free(of[is_local], copied_by[rows[is_local]])


def cast_their_gradients(casts: Casts, is_short: Bools) -> None:
    """Inserts the casts of backward: the gradient of such a product's input becomes float32, and short again.

    Args:
        casts: The step being rewritten, with all other casts.
        is_short: Which recorded storages leave their operator short, ``(storages,)``.
    """
    step, types = casts.step, casts.types
    storages, uses = step.storages, step.uses
    rows = np.flatnonzero(cast_twice(casts))
    if not len(rows):
        return
    size = np.full(len(step.ops), NONE, dtype=np.int64)
    size[uses.op_id[rows]] = bytes_read(step, uses.storage_id[rows], uses.op_id[rows])
    created = storages.created_op_id
    owner = np.where(created != NONE, types.forward[created], NONE)
    is_gradient = is_short & (owner != NONE) & (storages.category != "gradient")
    is_gradient &= storages.requested_bytes == size[owner]
    # Before the node that reads it next.
    is_read = is_gradient[uses.storage_id] & (types.forward[uses.op_id] != owner[uses.storage_id])
    is_read &= uses.op_id > created[uses.storage_id]
    begin = np.full(len(storages), len(step.ops), dtype=np.int64)
    np.minimum.at(begin, uses.storage_id[is_read], uses.op_id[is_read])
    found = np.flatnonzero(is_gradient & (begin < len(step.ops)))
    found = found[np.argsort(begin[found], kind="stable")]
    before, like = begin[found], created[found]
    is_wide = np.zeros(len(found), dtype=np.bool_)
    category = "temporary"
    copied_by, copies = casts.insert(found, before, like, to_short=is_wide, freed=before, category=category)
    shortened_by, made = casts.insert(
        found, before, like, to_short=~is_wide, freed=casts.freed[found], category=category, read=copies
    )
    casts.draft.free(copies, shortened_by)
    became = np.full(len(storages), NONE, dtype=np.int64)
    became[found] = made
    rows = np.flatnonzero((became[uses.storage_id] != NONE) & (uses.op_id >= begin[uses.storage_id]))
    casts.redirect(rows, became[uses.storage_id[rows]])
    casts.free(found, copied_by)
