"""Estimates a step in a short type coarsely: which operators stay in float32, and their workspaces, a dry run finds."""

import numpy as np

from memprof.policies.precision.misfits import refuse_unsuitable
from memprof.policies.precision.policy import Precision
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.insertion import new_ops
from memprof.policies.runtime.model_roots import root_of, trained_roots
from memprof.replay.rounding import rounded
from memprof.trace.schema import Bools
from memprof.trace.step import Step

#: Time of an operator as a share of float32's, as of its bytes; of a product only where its rates were not recorded.
SHORT_TIME = 0.5
_PASSES = ("forward", "backward")


def transform(step: Step, policy: Precision) -> Step:
    """Halves what trained models make but softmax and loss, and with pure bf16 the models; else copies weights."""
    ops, storages, made_by = step.ops, step.storages, step.storages.created_op_id
    is_trained = np.append(trained_roots(step)[root_of(step)], False)  # NONE is the last
    is_float = (storages.dtype == "float32") & (storages.shape != "")
    is_ours = is_float & is_trained[storages.module_id]
    refuse_unsuitable(step, policy, is_ours)
    is_lasting = np.isin(storages.category, ("parameter", "buffer", "gradient", "optimizer_state"))
    is_in_model, is_in_update = (np.append(np.isin(ops.phase, names), False) for names in (_PASSES, "optimizer"))
    is_in_model[:-1] &= [not ("softmax" in name or "loss" in name) for name in ops.name]
    is_short = is_ours & ~is_lasting & is_in_model[made_by]
    if policy.is_pure:
        is_short |= is_ours & is_lasting | is_float & is_in_update[made_by]
    plain, short = step.product_flops_per_us
    ratio = np.where((ops.flops > 0) & (short > 0), plain / max(short, 1), SHORT_TIME)
    times = ops.duration_us * np.where(is_trained[ops.module_id], ratio, 1.0)
    draft = Draft(step)
    draft.duration_us *= float(np.nansum(times) / max(np.nansum(ops.duration_us), 1e-9))
    draft.ops = ops.replace(duration_us=times)
    if not policy.is_pure:
        is_short = np.append(is_short, _cast_weights(draft, step, is_ours & (storages.category == "parameter")))
    storages, requested = draft.storages, draft.storages.requested_bytes // (1 + is_short)
    allocated = np.where(is_short, rounded(requested, storages.device), storages.allocated_bytes)
    dtypes = np.where(is_short, policy.torch_name, storages.dtype)
    draft.storages = storages.replace(requested_bytes=requested, allocated_bytes=allocated, dtype=dtypes)
    return draft.build()


def _cast_weights(draft: Draft, step: Step, is_weight: Bools) -> Bools:
    """Copies weights from forward's first product with each to backward's last; returns True for each copy."""
    ops, uses, saved, count = step.ops, step.uses, step.saved, len(step.storages)
    is_product = (ops.flops > 0) & (ops.phase == "forward")
    is_read = is_weight[uses.storage_id] & (uses.role == "read") & np.isin(ops.phase, _PASSES)[uses.op_id]
    products = uses.take(is_read & is_product[uses.op_id])
    weights, rows = np.unique(products.storage_id, return_index=True)
    first, last, became = np.full(count, len(ops)), np.zeros(count, dtype=np.int64), np.arange(count)
    first[weights] = before = products.op_id[rows]
    np.maximum.at(last, uses.storage_id[is_read], uses.op_id[is_read])
    casts = draft.insert_ops(new_ops(step, "aten._to_copy.default", before, module_id=ops.module_id[before]), before)
    became[weights] = copies = draft.copy_storages(weights, casts, last[weights])
    category = np.where(np.arange(count + len(copies)) < count, draft.storages.category, "activation")
    draft.storages = draft.storages.replace(category=category)
    is_copied = is_read & (uses.op_id >= first[uses.storage_id])
    draft.uses = uses.replace(storage_id=np.where(is_copied, became[uses.storage_id], uses.storage_id))
    draft.use(casts, weights, "read")
    draft.use(casts, copies, "write")
    is_kept = is_product[saved.forward_op_id]
    draft.saved = saved.replace(storage_id=np.where(is_kept, became[saved.storage_id], saved.storage_id))
    return np.ones(len(copies), dtype=np.bool_)
