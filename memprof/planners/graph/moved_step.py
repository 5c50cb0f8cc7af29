"""A step with storages offloaded to host memory: copies out and back next to its operators."""

from __future__ import annotations

import numpy as np

from memprof.planners.graph.moves import Moves
from memprof.policies.rewrite.draft import Draft
from memprof.policies.swap.copies import copy_ops
from memprof.trace.schema import NONE, Ints, Uses
from memprof.trace.step import Step


def step_with_moves(step: Step, moves: Moves, storage_id: Ints, stall_us: float) -> Step:
    """Rewrites a step so that storages leave and come back.

    Args:
        step: The step of the schedule: operator *i* is run *i*.
        moves: Which values leave, and when.
        storage_id: The storage of each move, shape ``(moves,)``.
        stall_us: Time the step waits for copies.
    """
    draft = Draft(step)
    speed = moves.link_bytes_per_us
    outs = copy_ops(step, moves.leave_run + 1, storage_id, moves.leave_run, "memprof.swap_out", speed)
    out_ids = draft.insert_ops(outs, moves.leave_run + 1)
    # Copies back at the same run come in list order.
    ins = copy_ops(step, moves.back_run, storage_id, moves.leave_run, "memprof.swap_in", speed)
    in_ids = draft.insert_ops(ins, moves.back_run)

    # A storage that leaves several times is a new storage after each return; the last one ends as the original did.
    order = np.lexsort((moves.leave_run, storage_id))
    owner = storage_id[order]
    is_last = np.append(owner[1:] != owner[:-1], True)[: len(owner)]
    is_first = np.append(True, owner[1:] != owner[:-1])[: len(owner)]
    gone = np.where(moves.gone_run == moves.leave_run, out_ids, moves.gone_run)[order]
    ends = np.where(is_last, step.storages.freed_op_id[owner], np.append(gone[1:], NONE)[: len(owner)])
    copies = step.storages.take(owner).replace(created_op_id=in_ids[order], freed_op_id=ends)
    copy_ids = draft.insert_storages(copies)
    freed = draft.storages.freed_op_id.copy()
    freed[owner[is_first]] = gone[is_first]
    draft.storages = draft.storages.replace(freed_op_id=freed)

    # Uses after a return refer to the storage that came back last.
    uses, key = draft.uses, owner * (len(step.ops) + 1) + moves.back_run[order]
    found = np.searchsorted(key, uses.storage_id * (len(step.ops) + 1) + uses.op_id, side="right") - 1
    is_late = (found >= 0) & (owner[found] == uses.storage_id)
    draft.uses = uses.replace(storage_id=np.where(is_late, copy_ids[found], uses.storage_id))
    sent = np.where(is_first, owner, np.append(NONE, copy_ids[:-1])[: len(owner)])
    draft.insert_uses(_uses(out_ids[order], sent, "read"))
    draft.insert_uses(_uses(in_ids[order], copy_ids, "write"))
    # Autograd no longer holds them: it holds host memory instead.
    draft.saved = draft.saved.take(~np.isin(draft.saved.storage_id, storage_id))
    draft.duration_us += stall_us
    return draft.build()


def _uses(op_ids: Ints, storage_ids: Ints, role: str) -> Uses:
    return Uses.of(op_id=op_ids, storage_id=storage_ids, role=np.full(len(op_ids), role, dtype=np.object_))
