"""Estimates a step in a short type coarsely: which operators stay in float32, and their workspaces, a dry run finds."""

import numpy as np

from memprof.policies.precision.misfits import refuse_unsuitable
from memprof.policies.precision.policy import CPU_TIME, DEVICE_TIME, Precision
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.insertion import new_ops
from memprof.policies.runtime.model_names import root_of, trained_roots
from memprof.replay.rounding import rounded
from memprof.trace.operator_facts import CAST, LOSS_WORDS, have_word
from memprof.trace.schema import Bools
from memprof.trace.step import Step


def transform(step: Step, policy: Precision) -> Step:
    """Halves what trained models make but softmax and loss, and with pure bf16 the models; else copies weights."""
    ops, storages, made_by = step.ops, step.storages, step.storages.created_op_id
    is_trained = np.append(trained_roots(step)[root_of(step)], False)  # NONE is the last
    is_float = (storages.dtype == "float32") & (storages.shape != "")
    is_ours = is_float & is_trained[storages.module_id]
    refuse_unsuitable(step, policy, is_ours)
    is_lasting = np.isin(storages.category, ("parameter", "buffer", "gradient", "optimizer_state"))
    in_update = np.append(ops.phase == "optimizer", False)[made_by]
    is_whole = np.append(have_word(ops.name, LOSS_WORDS), True)[made_by]
    is_short = is_ours & ~is_lasting & ~in_update & ~is_whole
    is_short |= (is_ours & is_lasting | is_float & in_update) & policy.is_pure
    draft, (plain, short) = Draft(step), step.product_flops_per_us
    ratio = np.where((ops.flops > 0) & (short > 0), plain / max(short, 1), DEVICE_TIME)
    ratio = np.where(is_trained[ops.module_id], ratio if step.targets_device() else CPU_TIME, 1.0)
    draft.duration_us *= float(np.nansum(ratio * ops.duration_us) / max(np.nansum(ops.duration_us), 1e-9))
    draft.ops = ops.replace(duration_us=ratio * ops.duration_us)
    _copy_weights(draft, step, is_ours & ~is_short & (storages.category == "parameter"))
    storages = draft.storages
    is_short = np.append(is_short, np.ones(len(storages) - len(is_short), dtype=np.bool_))  # the copies, too
    requested, allocated = storages.requested_bytes // (1 + is_short), storages.allocated_bytes
    allocated = np.where(is_short & (allocated > 0), rounded(requested, storages.device), allocated)
    dtypes = np.where(is_short, policy.torch_name, storages.dtype)
    draft.storages = storages.replace(requested_bytes=requested, allocated_bytes=allocated, dtype=dtypes)
    return draft.build()


def _copy_weights(draft: Draft, step: Step, is_weight: Bools) -> None:
    """Adds a copy of each weight that forward's products read, from the first of them to backward's last reader."""
    ops, uses, saved, count = step.ops, step.uses, step.saved, len(step.storages)
    is_product, is_pass = (ops.flops > 0) & (ops.phase == "forward"), np.isin(ops.phase, ("forward", "backward"))
    is_read = is_weight[uses.storage_id] & (uses.role == "read") & is_pass[uses.op_id]
    products = uses.take(is_read & is_product[uses.op_id])
    weights, rows = np.unique(products.storage_id, return_index=True)
    first, last, became = np.full(count, len(ops)), np.zeros(count, dtype=np.int64), np.arange(count)
    first[weights] = before = products.op_id[rows]
    np.maximum.at(last, uses.storage_id[is_read], uses.op_id[is_read])
    casts = draft.insert_ops(new_ops(step, CAST, before, module_id=ops.module_id[before]), before)
    became[weights] = copies = draft.copy_storages(weights, casts, last[weights])
    draft.storages.category[copies] = "activation"
    is_copied = is_read & (uses.op_id >= first[uses.storage_id])
    draft.uses = uses.replace(storage_id=np.where(is_copied, became[uses.storage_id], uses.storage_id))
    draft.use(casts, weights, "read")
    draft.use(casts, copies, "write")
    is_saved = is_product[saved.forward_op_id]
    draft.saved = saved.replace(storage_id=np.where(is_saved, became[saved.storage_id], saved.storage_id))
