"""A step with storages offloaded to host memory: copies out and back next to its operators."""

from __future__ import annotations

import numpy as np

from memprof.planners.graph.moves import Moves
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.new_ops import SWAP_IN, SWAP_OUT
from memprof.policies.swap.copies import copy_ops
from memprof.trace.schema import Ints
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
    outs = copy_ops(step, moves.leave_run + 1, storage_id, moves.leave_run, SWAP_OUT, speed)
    out_ids = draft.insert_ops(outs, moves.leave_run + 1)
    draft.use(out_ids, storage_id, "read")
    # Copies back at the same run come in list order.
    ins = copy_ops(step, moves.back_run, storage_id, moves.leave_run, SWAP_IN, speed)
    in_ids = draft.insert_ops(ins, moves.back_run)
    draft.split_lives(storage_id, np.where(moves.gone_run == moves.leave_run, out_ids, moves.gone_run), in_ids)
    draft.duration_us += stall_us
    return draft.build()
