"""A step being rewritten: operators and storages are added and changed, storages removed."""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from memprof.trace.schema import NONE, Floats, Ints, Memory, ModuleCalls, Ops, Saved, Storages, Texts, Uses
from memprof.trace.step import Step, rows_of


class Draft:
    """A step being rewritten.

    While it is a draft, ids are those of the step it began with; what is inserted takes the next free ones. ``build``
    puts everything in order and numbers it anew. The tables may be replaced as a whole (``draft.storages =
    draft.storages.replace(...)``), but operators and storages are added with the methods that return their ids, and
    storages removed with ``remove_storages`` only.

    Attributes:
        ops: Operators; ``op_id`` is the row.
        storages: Storages; ``storage_id`` is the row.
        uses: Which operator touches which storage.
        saved: What forward keeps for backward.
        module_calls: Calls of modules; those made inside inserted operators need not be stated.
        duration_us: How long the step takes.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self.ops: Ops = step.ops
        self.storages: Storages = step.storages
        self.uses: Uses = step.uses
        self.saved: Saved = step.saved
        self.module_calls: ModuleCalls = step.module_calls
        self.duration_us = step.duration_us
        self._place: Floats = np.arange(len(step.ops), dtype=np.float64)
        self._gone_storages: list[Ints] = []

    def insert_ops(self, rows: Ops, before: int | Ints) -> Ints:
        """Inserts operators, in their order, each directly before an operator of the original step.

        What was inserted there earlier stays in front of them.

        Args:
            rows: The operators; their ``op_id`` is ignored. ``forward_op_id`` speaks in ids of the draft.
            before: Original operator before which they run, one for all or one each; the number of original
                operators stands for the end of the step.

        Returns:
            Their ids in the draft, shape ``(rows,)``.
        """
        ids = np.arange(len(self.ops), len(self.ops) + len(rows))
        self.ops = Ops.joined((self.ops, rows.replace(op_id=ids)))
        self._place = np.append(self._place, np.broadcast_to(np.asarray(before) - 0.5, len(rows)))
        return ids

    def insert_storages(self, rows: Storages) -> Ints:
        """Inserts storages, whose ``created_op_id`` and ``freed_op_id`` speak in ids of the draft.

        Returns:
            Their ids in the draft, shape ``(rows,)``.
        """
        ids = np.arange(len(self.storages), len(self.storages) + len(rows))
        self.storages = Storages.joined((self.storages, rows.replace(storage_id=ids)))
        return ids

    def copy_storages(self, storage_ids: Ints, created: Ints, freed: Ints) -> Ints:
        """Inserts storages that are like others, but made and freed by operators of their own.

        Returns:
            Their ids in the draft, as long as ``storage_ids``.
        """
        return self.insert_storages(self.storages.take(storage_ids).replace(created_op_id=created, freed_op_id=freed))

    def insert_uses(self, rows: Uses) -> None:
        """Inserts uses, in ids of the draft."""
        self.uses = Uses.joined((self.uses, rows))

    def use(self, op_ids: Ints, storage_ids: Ints, role: str) -> None:
        """Inserts one use for each pair of an operator and a storage, all of one role."""
        self.insert_uses(Uses.of(op_id=op_ids, storage_id=storage_ids, role=np.full(len(op_ids), role)))

    def repeat_ops(self, op_ids: Ints, before: Ints) -> Ints:
        """Inserts repeats of operators: recomputation, of the phase and micro-batch that it interrupts.

        A repeat belongs to no forward operator. It has no uses yet; ``copy_uses`` gives it those of its operator.

        Args:
            op_ids: The operators to run again, in the order in which they do.
            before: Original operator before which each runs; the number of original operators for the end of the step.

        Returns:
            The ids of the repeats in the draft, as long as ``op_ids``.
        """
        interrupted = np.minimum(before, len(self._step.ops) - 1)
        rows = self.ops.take(op_ids).replace(
            phase=self.ops.phase[interrupted],
            micro_batch=self.ops.micro_batch[interrupted],
            is_recompute=np.ones(len(op_ids), dtype=np.bool_),
            forward_op_id=np.full(len(op_ids), NONE),
        )
        return self.insert_ops(rows, before)

    def copy_uses(self, op_ids: Ints, copies: Ints) -> None:
        """Gives copies of operators the uses of their operators, of the same storages."""
        order = np.argsort(self.uses.op_id, kind="stable")
        rows, times = rows_of(self.uses.op_id[order], op_ids)
        self.insert_uses(self.uses.take(order[rows]).replace(op_id=np.repeat(copies, times)))

    def redirect_uses(self, storage_ids: Ints, to: Ints, first: Ints, last: Ints | None = None) -> None:
        """Replaces storages by others for all operators of a span, inserted ones included.

        Of several spans of a storage that cover an operator, the one that begins last counts.

        Args:
            storage_ids: The storages replaced, shape ``(spans,)``.
            to: What is used instead of each.
            first: First operator that uses that, in ids of the draft.
            last: Last operator that does; all up to the end of the step if omitted.
        """
        ranks = self.ranks()
        ends = len(ranks) if last is None else ranks[last]
        uses = self.uses
        found = find_spans(uses.storage_id, ranks[uses.op_id], of=storage_ids, first=ranks[first], last=ends)
        self.uses = uses.replace(storage_id=np.where(found != NONE, np.append(to, NONE)[found], uses.storage_id))

    def split_lives(self, storage_ids: Ints, last: Ints, made_by: Ints, freed: Ints | None = None) -> Ints:
        """Frees storages early, and lets operators make them again, as copies that all later operators use.

        Autograd keeps none of these storages any more. A storage may be given several times, for several absences.

        Args:
            storage_ids: The storages, shape ``(absences,)``.
            last: Operator after which each absence begins.
            made_by: Operator that makes the copy, which ends the absence.
            freed: When the storage is freed at last, as ``freed_op_id``; when it was so far, if omitted.

        Returns:
            The ids of the copies in the draft, shape ``(absences,)``.
        """
        order = np.lexsort((self.ranks()[made_by], storage_ids))
        ends = (self.storages.freed_op_id[storage_ids] if freed is None else freed)[order]
        owner, begins = storage_ids[order], last[order]
        is_first = np.append(True, owner[1:] != owner[:-1])[: len(owner)]
        again = np.flatnonzero(~is_first)
        ends[again - 1] = begins[again]
        copies = np.empty(len(order), dtype=np.int64)
        copies[order] = self.copy_storages(owner, made_by[order], ends)
        self.free(owner[is_first], begins[is_first])
        self.redirect_uses(storage_ids, copies, made_by)
        self.use(made_by, copies, "write")
        self.unsave(storage_ids)
        return copies

    def free(self, storage_ids: Ints, after: int | Ints) -> None:
        """Changes when storages are freed: after an operator of the draft, or NONE where they outlive the step."""
        freed = self.storages.freed_op_id.copy()
        freed[storage_ids] = after
        self.storages = self.storages.replace(freed_op_id=freed)

    def unsave(self, storage_ids: Ints) -> None:
        """Takes storages out of what autograd keeps for backward."""
        self.saved = self.saved.take(~np.isin(self.saved.storage_id, storage_ids))

    def ranks(self) -> Ints:
        """Returns the position of each operator in the order in which they run, ``(ops,)``."""
        ranks = np.empty(len(self.ops), dtype=np.int64)
        ranks[np.argsort(self._place, kind="stable")] = np.arange(len(ranks))
        return ranks

    def remove_storages(self, storage_ids: Ints) -> None:
        """Takes storages out, with every use of them and what was saved of them."""
        self._gone_storages.append(np.asarray(storage_ids, dtype=np.int64))

    def build(self) -> Step:
        """Puts everything in order and renumbers it; the step has no recorded counters any more.

        Raises:
            InvariantError: The step is inconsistent, such as a storage freed before it is made.
        """
        order = np.argsort(self._place, kind="stable")
        new_op = np.full(len(self.ops) + 1, NONE, dtype=np.int64)  # the last stands for NONE
        new_op[order] = np.arange(len(order))
        ops = self.ops.take(order)
        ops = ops.replace(op_id=np.arange(len(order)), forward_op_id=new_op[ops.forward_op_id])

        created = new_op[self.storages.created_op_id]
        storage_order = np.argsort(created, kind="stable")
        gone = np.concatenate([np.empty(0, dtype=np.int64), *self._gone_storages])
        storage_order = storage_order[~np.isin(storage_order, gone)]
        new_storage = np.full(len(self.storages), NONE, dtype=np.int64)
        new_storage[storage_order] = np.arange(len(storage_order))
        storages = self.storages.take(storage_order)
        storages = storages.replace(
            storage_id=np.arange(len(storages)),
            created_op_id=created[storage_order],
            freed_op_id=new_op[storages.freed_op_id],
            held_op_id=new_op[storages.held_op_id],
        )
        more = len(self.storages) - len(self._step.storage_ids)
        known = np.append(self._step.storage_ids, np.full(more, NONE))

        uses = self.uses.take(new_storage[self.uses.storage_id] != NONE)
        uses = uses.replace(op_id=new_op[uses.op_id], storage_id=new_storage[uses.storage_id])
        uses = uses.take(np.argsort(uses.op_id, kind="stable"))
        saved = self.saved.take(new_storage[self.saved.storage_id] != NONE)
        saved = saved.replace(
            storage_id=new_storage[saved.storage_id],
            forward_op_id=new_op[saved.forward_op_id],
            released_op_id=new_op[saved.released_op_id],
        )
        saved = saved.take(np.argsort(saved.forward_op_id, kind="stable"))
        step = dataclasses.replace(
            self._step,
            duration_us=self.duration_us,
            module_calls=self._calls(new_op, order),
            ops=ops,
            storages=storages,
            uses=uses,
            saved=saved,
            memory=Memory.empty(),
            storage_ids=known[storage_order],
        )
        step.check()
        return step

    def _calls(self, new_op: Ints, order: Ints) -> ModuleCalls:
        """Renumbers the module calls; what is inserted at their edges stays outside."""
        calls = self.module_calls
        # Ids above those of the original step have no place among its calls: they are their own.
        places = self._place[order]
        first, last = calls.first_op_id, calls.last_op_id
        is_empty = (first == NONE) | (last == NONE)
        new_first = np.searchsorted(places, self._place[first], side="left")
        new_last = np.searchsorted(places, self._place[last], side="right") - 1
        is_empty |= new_last < new_first
        return calls.replace(
            first_op_id=np.where(is_empty, NONE, new_first), last_op_id=np.where(is_empty, NONE, new_last)
        )


def find_spans(storage_ids: Ints, moments: Ints, *, of: Ints, first: Ints, last: int | Ints) -> Ints:
    """Finds the span of a storage that covers a moment; of several, the one that begins last.

    Args:
        storage_ids: The storages looked up.
        moments: A moment for each; NONE is in no span.
        of: The storage of each span, shape ``(spans,)``.
        first: First moment of each span.
        last: Last moment of each span, or of all; ``first`` again for spans of one moment.

    Returns:
        Rows of the spans, as long as ``storage_ids``; NONE where no span covers the moment.
    """
    order = np.lexsort((first, of))
    width = max(int(moments.max(initial=0)), int(first.max(initial=0))) + 2
    keys = of[order] * width + first[order]
    place = np.searchsorted(keys, storage_ids * width + moments, side="right") - 1
    rows = np.append(order, NONE)[place]  # the last entry stands for no span
    is_same = np.append(of, NONE)[rows] == storage_ids
    is_within = moments <= np.append(np.broadcast_to(last, len(of)), NONE)[rows]
    return np.where(is_same & is_within, rows, NONE)


def element_bytes(dtypes: Texts) -> Ints:
    """Returns the bytes of one element of each type, such as bfloat16, float8_e4m3fn or bool; 1 for unnamed ones."""
    sizes = {dtype: _size_of(str(dtype)) for dtype in set(dtypes.tolist())}
    return np.array([sizes[dtype] for dtype in dtypes.tolist()], dtype=np.int64)


def _size_of(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1
