"""Rewrites a step into one whose forward and backward run once per micro-batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.accumulate.batch import find_batch, part_sizes
from memprof.policies.accumulate.scale import Scaled, scale_step
from memprof.policies.accumulate.seen import HELD, refuse_changes, refuse_loop
from memprof.policies.rewrite.carried import carried_over
from memprof.trace.schema import NONE, Bools, Ints, Memory, ModuleCalls, Saved, Storages, Uses, is_beside
from memprof.trace.step import Step

if TYPE_CHECKING:
    from memprof.policies.accumulate.policy import Accumulate

#: In the stack of operators that fetch a whole batch.
_FETCHES = ("torch/utils/data/",)


def transform(step: Step, policy: Accumulate) -> Step:
    """Repeats forward and backward on each part of the batch, before one update.

    The first micro-batch leaves its gradients where the recorded step had them; each later one makes its gradients as
    temporaries, which AccumulateGrad adds in place and frees immediately. What a DataLoader fetched stays whole, since
    the parts are views of it. What Python kept from one iteration to the next (the loss) is kept from one micro-batch
    to the next.

    Raises:
        PolicyError: The batch cannot be determined, or the optimizer runs within backward.
    """
    phase = step.ops.phase
    forward, backward = np.flatnonzero(phase == "forward"), np.flatnonzero(phase == "backward")
    if not len(forward) or not len(backward):
        raise PolicyError("accumulate needs a step with forward and backward; record a step that trains.")
    if not np.any(phase == "optimizer"):
        raise PolicyError(
            "accumulate delays the optimizer's update, and the recorded step has none; use it in a loop that calls an "
            "optimizer's step()."
        )
    refuse_loop(step, policy)
    if np.any(phase[forward[0] : backward[-1]] == "optimizer"):
        raise PolicyError(
            "accumulate does not fit the recorded step: its optimizer runs before the last backward (within it, or "
            "between two networks that train in turn), where gradients of the whole batch would not be complete."
        )
    refuse_changes(step, int(backward[-1]))
    batch = find_batch(step)
    parts = part_sizes(batch.size, policy.micro_batches)
    repeats = _repeated(step, int(forward[0]), batch.size)
    return _Repetition(step, repeats, int(forward[0]), scale_step(step, batch, parts, repeats)).build()


def _repeated(step: Step, first_forward: int, batch_size: int) -> Bools:
    """Returns the operators that run for each micro-batch, shape (ops,)."""
    ops = step.ops
    frames = step.stacks.frames
    is_held = np.array([any(place in text for place in HELD) for text in frames] + [False], dtype=np.bool_)
    fetches = np.array([any(place in text for place in _FETCHES) for text in frames] + [False], dtype=np.bool_)
    is_other = is_beside(ops.phase)
    before = np.arange(len(ops)) < first_forward
    once = np.isin(ops.phase, ("optimizer", "saving", "loading"))
    has_own = _evaluates_own_batches(step, batch_size)
    once |= is_other & (is_held[ops.stack_id] | ((before | has_own) & fetches[ops.stack_id]))
    once |= has_own & (ops.phase == "evaluation")
    repeated: Bools = ~once
    return repeated


def _evaluates_own_batches(step: Step, batch_size: int) -> bool:
    """Returns whether the step evaluates batches it does not train on: those stay whole and run once.

    It may read the same constants in both, such as a table of noise levels.
    """
    uses = step.uses
    phase = step.ops.phase[uses.op_id]
    is_input = (step.storages.category == "input")[uses.storage_id]
    trained, evaluated = (np.unique(uses.storage_id[is_input & (phase == name)]) for name in ("forward", "evaluation"))
    shared = step.storages.shape[np.intersect1d(evaluated, trained)]
    return len(evaluated) > 0 and not any(str(batch_size) in str(shape).split("x") for shape in shared)


class _Repetition:
    """The repeated rows of a step: tables that map an old row and a micro-batch to the new row."""

    def __init__(self, step: Step, repeats: Bools, first_forward: int, scaled: Scaled) -> None:
        self.step, self.repeats, self.scaled = step, repeats, scaled
        self.parts = len(scaled.share)
        ops = len(step.ops)
        # Operators that run once do so before the first micro-batch or after the last.
        self.home = home = np.where(np.arange(ops) < first_forward, 0, self.parts - 1)
        micro = np.arange(self.parts)[:, None]
        exists = repeats[None, :] | (home[None, :] == micro)
        self.op_micro, self.old_op = np.nonzero(exists)
        self.new_op = np.full((self.parts, ops + 1), NONE, dtype=np.int64)  # the last column stands for NONE
        self.new_op[self.op_micro, self.old_op] = np.arange(len(self.old_op))
        for number in range(self.parts):
            once = ~exists[number]
            self.new_op[number, :-1][once] = self.new_op[home, np.arange(ops)][once]
        #: Last new row at or before each old operator in each micro-batch.
        own = np.where(exists, self.new_op[:, :-1], NONE)
        self.at_or_before = np.maximum.accumulate(own.reshape(-1)).reshape(own.shape)

    def build(self) -> Step:
        step = self.step
        ops = self.scaled.ops(self.old_op, self.op_micro, self.repeats)
        rounds = int(step.ops.micro_batch.max()) + 1
        ops = ops.replace(
            op_id=np.arange(len(ops)),
            micro_batch=ops.micro_batch + self.op_micro * rounds,
            forward_op_id=self.new_op[self.op_micro, ops.forward_op_id],
        )
        storages, storage_ids = self._storages()
        added, adds, uses = self._uses()
        names, mutates = ops.name.copy(), ops.mutates.copy()
        names[added], mutates[added] = "aten.add_.Tensor", True
        # Backward is seeded with the part's share instead of 1.
        begins = (names == "aten.ones_like.default") & (np.append(ops.phase[1:], "") == "backward")
        names[begins & (ops.phase == "forward")] = "aten.full_like.default"
        ops = ops.replace(name=names, mutates=mutates)
        ops = self.scaled.with_additions(ops, added, adds, storages)
        created, freed = storages.created_op_id, storages.freed_op_id
        # A storage that Python freed early does not exist for the operators of a later micro-batch.
        is_there = (created[uses.storage_id] <= uses.op_id) & (
            (freed[uses.storage_id] == NONE) | (freed[uses.storage_id] >= uses.op_id)
        )
        uses = uses.take(is_there)
        built = dataclasses.replace(
            step,
            duration_us=self.scaled.duration_us(ops),
            module_calls=self._module_calls(),
            ops=ops,
            storages=storages,
            uses=uses.take(np.argsort(uses.op_id, kind="stable")),
            saved=self._saved(storages),
            memory=Memory.empty(),
            storage_ids=storage_ids,
        )
        built.check()
        return built

    def _storages(self) -> tuple[Storages, Ints]:
        """Lays out the storages and fills ``new_storage``: shape (parts, storages)."""
        step, old = self.step, self.step.storages
        created, freed = old.created_op_id, old.freed_op_id
        is_older = created == NONE
        is_repeated = ~is_older & self.repeats[created]
        self.accumulated_at = _accumulated_at(step, is_repeated)
        is_gradient = self.accumulated_at != NONE
        # A gradient that AccumulateGrad had to copy, as it could not take it over, is copied once.
        is_own_copy = is_gradient & (self.accumulated_at == created)
        micro, row = np.nonzero((is_repeated & ~is_own_copy)[None, :] | (np.arange(self.parts)[:, None] == 0))
        carried, carrier = carried_over(step, is_repeated & ~is_gradient)

        new_created = np.where(is_older[row], NONE, self.new_op[micro, created[row]])
        # Older than the step: freed in the first micro-batch, unless an operator that runs once, such as an update,
        # frees it. Made once, earlier: freed by its last use. A gradient holds the sum over all micro-batches until
        # the update has used it.
        ends_with_its_part = is_repeated[row] & ~is_gradient[row]
        # What is made once and freed by an operator that runs once, as in an evaluation, is freed there.
        is_short = (freed[row] != NONE) & ~self.repeats[freed[row]]
        end_of_once = np.where(is_short, self.home[freed[row]], self.parts - 1)
        end = np.where(ends_with_its_part, micro, np.where(is_older[row] & ~is_short, 0, end_of_once))
        new_freed = np.where(freed[row] == NONE, NONE, self.at_or_before[end, freed[row]])
        is_kept_on = (carried[row] != NONE) & (micro < self.parts - 1)
        dropped_at = self.at_or_before[np.minimum(micro + 1, self.parts - 1), freed[carried[row]]]
        new_freed = np.where(is_kept_on, dropped_at, new_freed)
        is_added = is_gradient[row] & (micro > 0)
        new_freed = np.where(is_added, self.new_op[micro, self.accumulated_at[row]], new_freed)
        new_freed = np.where(new_freed == NONE, NONE, np.maximum(new_freed, new_created))

        share_of = np.where(is_older[row], self.parts - 1, micro)
        rows = self.scaled.storages(row, share_of, carrier)
        rows = rows.replace(
            created_op_id=new_created,
            freed_op_id=new_freed,
            category=np.where(is_added, "temporary", rows.category),
        )
        order = np.argsort(new_created, kind="stable")
        rows = rows.take(order).replace(storage_id=np.arange(len(order)))
        self.new_storage = np.full((self.parts, len(old)), NONE, dtype=np.int64)
        self.new_storage[micro[order], row[order]] = np.arange(len(order))
        for number in range(1, self.parts):
            missing = self.new_storage[number] == NONE
            self.new_storage[number][missing] = self.new_storage[0][missing]
            # Reads of the previous iteration become reads of the previous micro-batch.
            known = np.flatnonzero(carrier != NONE)
            self.new_storage[number][known] = self.new_storage[number - 1][carrier[known]]
        return rows, np.where(micro > 0, NONE, step.storage_ids[row])[order]

    def _uses(self) -> tuple[Ints, Ints, Uses]:
        """Repeats the uses; also returns the operators that add gradients, and the gradients they add to."""
        uses = self.step.uses
        micro, row = self._rows_of(uses.op_id)
        repeated = Uses(
            op_id=self.new_op[micro, uses.op_id[row]],
            storage_id=self.new_storage[micro, uses.storage_id[row]],
            role=uses.role[row],
        )
        gradients = np.flatnonzero(self.accumulated_at != NONE)
        later = np.repeat(np.arange(1, self.parts), len(gradients))
        gradients = np.tile(gradients, self.parts - 1)
        op, kept = self.new_op[later, self.accumulated_at[gradients]], self.new_storage[0, gradients]
        written = (repeated.role == "write") & np.isin(repeated.op_id, op)
        own = repeated.take(~(written & np.isin(repeated.storage_id, kept)))
        mutates = np.full(len(op), "mutate", dtype=np.object_)
        merged = Uses(
            op_id=np.append(own.op_id, op),
            storage_id=np.append(own.storage_id, kept),
            role=np.append(own.role, mutates),
        )
        return op, kept, merged

    def _saved(self, storages: Storages) -> Saved:
        saved = self.step.saved
        micro, row = self._rows_of(saved.forward_op_id)
        repeated = saved.take(row).replace(
            storage_id=self.new_storage[micro, saved.storage_id[row]],
            forward_op_id=self.new_op[micro, saved.forward_op_id[row]],
            released_op_id=self.new_op[micro, saved.released_op_id[row]],
        )
        created, freed = storages.created_op_id[repeated.storage_id], storages.freed_op_id[repeated.storage_id]
        last = np.maximum(repeated.forward_op_id, repeated.released_op_id)
        is_there = (created <= repeated.forward_op_id) & ((freed == NONE) | (freed >= last))
        repeated = repeated.take(is_there)
        return repeated.take(np.argsort(repeated.forward_op_id, kind="stable"))

    def _rows_of(self, op_ids: Ints) -> tuple[Ints, Ints]:
        """Returns the micro-batch and the old row of each row that belongs to an operator."""
        once = ~self.repeats[op_ids]
        home = np.zeros(len(op_ids), dtype=np.int64)
        micro, row = np.nonzero(~once[None, :] | (np.arange(self.parts)[:, None] == home[None, :]))
        return micro, row

    def _module_calls(self) -> ModuleCalls:
        calls = self.step.module_calls
        first, last = calls.first_op_id, calls.last_op_id
        micro = np.repeat(np.arange(self.parts), len(calls))
        row = np.tile(np.arange(len(calls)), self.parts)
        shift = micro * len(calls)
        parent = calls.parent_call_id[row]
        return calls.take(row).replace(
            module_call_id=np.arange(len(row)),
            parent_call_id=np.where(parent == NONE, NONE, parent + shift),
            first_op_id=self.new_op[micro, first[row]],
            last_op_id=self.new_op[micro, last[row]],
        )


def _accumulated_at(step: Step, is_repeated: Bools) -> Ints:
    """Returns, for each gradient the step makes, the operator with which AccumulateGrad stores it; NONE elsewhere.

    AccumulateGrad belongs to no forward operator. It takes a gradient over (detach), or copies it if it is referenced
    elsewhere; without an operator of its own, it stores the gradient when it is made.
    """
    storages, uses, ops = step.storages, step.uses, step.ops
    is_gradient = is_repeated & (storages.category == "gradient")
    found = np.where(is_gradient, storages.created_op_id, NONE)
    is_keeping = (ops.phase == "backward") & (ops.forward_op_id == NONE)
    # A loop that accumulates by itself adds the gradients of its later backwards to those of the first.
    is_same = ops.micro_batch[uses.op_id] == ops.micro_batch[storages.created_op_id[uses.storage_id]]
    row = np.flatnonzero(is_gradient[uses.storage_id] & is_keeping[uses.op_id] & is_same)
    np.maximum.at(found, uses.storage_id[row], uses.op_id[row])
    return found
