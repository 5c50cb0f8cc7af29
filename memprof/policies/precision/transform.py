"""Estimates a step in a short type coarsely (a dry run finds the rest), and which steps and jobs do not support one."""

from __future__ import annotations

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.precision.policy import CPU_TIME, DEVICE_TIME, LBFGS, NO_BF16, Precision
from memprof.policies.rewrite.draft import Draft
from memprof.policies.rewrite.insertion import new_ops
from memprof.policies.rewrite.stack_marks import is_in_compiled_code
from memprof.policies.runtime.model_names import root_of, trained_roots
from memprof.replay.rounding import rounded
from memprof.trace.operator_facts import CAST, LOSS_WORDS, have_word
from memprof.trace.schema import NONE, Bools
from memprof.trace.step import Step
from memprof.trace.usages import IS_LBFGS


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


#: Floating point types shorter than float32.
_SHORT_TYPES = ("float8", "float16", "bfloat16", "complex32")
_INTEGERS = ("int64", "int32")
#: Largest integer up to which a type represents all.
_EXACT_INTEGERS = {"bf16": 256, "fp16": 2048}


def refuse_unsuitable(step: Step, policy: Precision, is_ours: Bools) -> None:
    """Rejects a step that gains nothing from a short type, or that would compute something else.

    Args:
        step: The recorded step.
        policy: The policy.
        is_ours: Float32 tensors that trained models consist of or make, shape ``(storages,)``.

    Raises:
        PolicyError: The step is one of these, or the device does not support the type.
    """
    if policy.dtype == "bf16" and not step.runs_bf16():
        raise PolicyError(NO_BF16)
    if policy.dtype == "fp16" and any(IS_LBFGS in optimizer.words for optimizer in step.optimizers):
        raise PolicyError(LBFGS)
    if reason := why_not_compiled(step, policy):
        raise PolicyError(reason)
    if short := short_types(product_types(step)):
        raise PolicyError(f"precision: the recorded job already computes in {short}; leave the policy out.")
    if not np.any(is_ours & (step.storages.category == "parameter")):
        raise PolicyError("precision: the recording trains no model with float32 parameters; leave the policy out.")
    _refuse_rounded_integers(step, policy, is_ours)


def product_types(step: Step) -> set[str]:
    """Returns the types of what forward's matrix products and convolutions make."""
    is_product = (step.ops.flops > 0) & (step.ops.phase == "forward")
    wrote = step.uses.take(is_product[step.uses.op_id] & (step.uses.role == "write"))
    return set(step.storages.dtype[wrote.storage_id].tolist())


def short_types(types: set[str]) -> str:
    """Returns the types of a set that are shorter than float32, joined by ``and``; "" for none."""
    return " and ".join(sorted(name for name in types if name.startswith(_SHORT_TYPES)))


def why_not_compiled(step: Step, policy: Precision) -> str:
    """Returns why the policy cannot be predicted for code that torch.compile generated; "" without such code."""
    if not np.any(is_in_compiled_code(step) & (step.ops.phase == "forward")):
        return ""
    return (
        f"precision: torch.compile generates other code in {policy.dtype}, which this recording does not predict; "
        f"dry-run the job under the policy: memprof record --dry-run --{policy.describe()}."
    )


def _refuse_rounded_integers(step: Step, policy: Precision, is_ours: Bools) -> None:
    """Rejects a step that casts integers to a floating point type and back, such as by ``x.new_tensor(rows)``."""
    ops, uses, is_integer = step.ops, step.uses, np.isin(step.storages.dtype, _INTEGERS)
    is_cast = (ops.name == CAST) & (ops.phase == "forward") & (ops.module_id != NONE)
    reads, writes = (uses.take(is_cast[uses.op_id] & (uses.role == role)) for role in ("read", "write"))
    of_integers = reads.op_id[is_integer[reads.storage_id]]
    copies = writes.storage_id[is_ours[writes.storage_id] & np.isin(writes.op_id, of_integers)]
    back = reads.op_id[np.isin(reads.storage_id, copies)]
    if np.isin(writes.op_id[is_integer[writes.storage_id]], back).any():
        raise PolicyError(
            f"precision: integers are cast to a floating point type and back; in {policy.dtype} those above "
            f"{_EXACT_INTEGERS[policy.dtype]} would be rounded. Keep them integers there, or leave the policy out."
        )
