"""Estimates a step under a chunked loss: what the cross-entropy makes as large as its logits shrinks to a chunk."""

from __future__ import annotations

import dataclasses

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.loss.candidates import linear_modules
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.plan.patterns import match_modules
from memprof.replay.rounding import rounded
from memprof.trace.operator_facts import DUPLICATES, LOG_SOFTMAX, NLL_WORDS, are_among, have_word
from memprof.trace.schema import NONE, Memory
from memprof.trace.step import Step


def transform(step: Step, policy: ChunkedLoss) -> Step:
    """Shrinks log-softmax, casts and their gradients to a chunk; with a head the logits, which it makes twice, too.

    Raises:
        PolicyError: The step has no large cross-entropy, or the head makes the logits of none.
    """
    ops, uses, storages = step.ops, step.uses, step.storages
    made_by, freed, is_read = storages.created_op_id, storages.freed_op_id.copy(), uses.role == "read"
    calls = ops.stack_id[have_word(ops.name, NLL_WORDS)]  # of cross_entropy, if shared
    is_softmax = (ops.name == LOG_SOFTMAX) & np.isin(ops.op_id, ops.forward_op_id)
    is_input = (is_softmax & np.isin(ops.stack_id, calls))[uses.op_id] & is_read
    is_input &= storages.allocated_bytes[uses.storage_id] >= policy.minimum_bytes
    softmax, logits = uses.op_id[is_input], np.unique(uses.storage_id[is_input])
    if not len(logits):
        raise PolicyError(f"loss: no cross_entropy trains on {policy.minimum_bytes:,} bytes of logits (minimum_bytes).")
    backward = np.flatnonzero(np.isin(ops.forward_op_id, softmax))
    copies = np.flatnonzero(are_among(ops.name, DUPLICATES))
    copies = copies if policy.head else np.intersect1d(copies, softmax - 1)  # the model's, or autocast's in the call
    is_chunked, duration = np.isin(made_by, softmax), ops.duration_us.copy()
    while np.any(is_copied := np.isin(made_by[logits], copies)):
        is_chunked[logits[is_copied]] = True
        sources = uses.storage_id[is_read & np.isin(uses.op_id, made_by[logits[is_copied]])]
        logits = np.union1d(logits[~is_copied], sources)
    if policy.head:
        names = step.modules.name.astype(str).tolist()
        is_head = np.append(linear_modules(step) & np.isin(names, match_modules([policy.head], names)), False)
        if not np.any(is_head[storages.module_id[logits]]):
            raise PolicyError(f"{policy.head!r} makes no logits of a cross-entropy; name the Linear that does.")
        is_left = (made_by == NONE) & (freed != NONE)  # by the step before, such as the logits that its loop held
        is_chunked |= np.isin(storages.shape, storages.shape[logits]) & (is_left | np.isin(made_by, made_by[logits]))
        duration[backward[0]] += np.nansum(duration[is_head[ops.module_id] & (ops.phase == "forward")])
    else:  # kept until backward in place of their softmax
        freed[logits] = np.where(freed[logits] == NONE, NONE, np.maximum(freed[logits], backward[-1]))
    readers = uses.op_id[is_read & is_chunked[uses.storage_id]]
    is_chunked |= np.isin(made_by, np.flatnonzero(np.isin(ops.forward_op_id, readers) & (ops.phase == "backward")))
    requested = np.where(is_chunked, -(-storages.requested_bytes // policy.chunks), storages.requested_bytes)
    allocated = np.where(is_chunked, rounded(requested, storages.device), storages.allocated_bytes)
    rows = storages.replace(requested_bytes=requested, allocated_bytes=allocated, freed_op_id=freed)
    total_us = step.duration_us + float(np.nansum(duration - ops.duration_us))
    share = np.where(np.isin(ops.op_id, uses.op_id[is_chunked[uses.storage_id]]), policy.chunks, 1)
    ops = ops.replace(duration_us=duration, workspace_bytes=ops.workspace_bytes // share)
    return dataclasses.replace(step, duration_us=total_us, ops=ops, storages=rows, memory=Memory.empty())
