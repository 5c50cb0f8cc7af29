"""Detects recorded steps that do not support a short type, at prediction time rather than when the job fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.precision.autocast_lists import RECURRENT, SHORT_TYPES, is_one_of
from memprof.policies.precision.policy import CREATE_GRAPH, NOT_OF_OUTPUT
from memprof.policies.precision.roots import of_trained_models
from memprof.policies.rewrite.stack_marks import is_in_compiled_code
from memprof.trace.schema import NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memprof.policies.precision.flow import Types
    from memprof.policies.precision.policy import Precision
    from memprof.trace.step import Step

#: Operators that require one type for all floating point operands, and that autocast casts on no device.
ONE_TYPE = (
    *("index_add", "index_add_", "index_put_", "index_copy_", "index_reduce", "index_reduce_", "put", "put_"),
    *("scatter", "scatter_", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
    *("masked_scatter", "masked_scatter_", "lerp", "lerp_"),
)
#: Products that accept a sparse matrix, and those of them whose operands autocast casts.
_SPARSE_PRODUCTS = ("mm", "addmm", "_sparse_addmm")
_CAST_PRODUCTS = ("mm", "addmm")
_INDICES = ("int64", "int32")
#: Largest integer up to which a type represents all.
_EXACT_INTEGERS = {"bf16": 256, "fp16": 2048}
#: Roles of an operator's operands and results.
_OPERANDS = ("read", "write")


def refuse_own_autocast(step: Step, policy: Precision) -> None:
    """Rejects a step of a job that already runs under its own autocast, which casts its weights itself.

    Raises:
        PolicyError: The job does.
    """
    uses, storages = step.uses, step.storages
    is_cast = np.char.startswith(step.ops.name.astype(str), "aten._to_copy") & (step.ops.phase == "forward")
    reads_weight = np.zeros(len(is_cast), dtype=np.bool_)
    is_weight = (storages.category == "parameter") & (storages.dtype == "float32")
    reads_weight[uses.op_id[is_weight[uses.storage_id] & (uses.role == "read")]] = True
    made = storages.created_op_id
    is_of_cast = (made != NONE) & (is_cast & reads_weight)[made]
    for dtype in SHORT_TYPES.values():
        is_here = np.any(is_of_cast & (storages.dtype == dtype))
        if is_here and (policy.is_pure or SHORT_TYPES[policy.dtype] != dtype):
            raise PolicyError(
                f"precision: the recorded job already runs under autocast, in {dtype}; leave the policy out, or "
                "remove autocast (and GradScaler) from the script and record it again."
            )


def why_not_compiled(step: Step, policy: Precision) -> str:
    """Returns why the policy cannot be predicted for code that torch.compile generated; "" without such code."""
    if not np.any(is_in_compiled_code(step) & (step.ops.phase == "forward")):
        return ""
    return (
        f"precision: torch.compile generates other code in {policy.dtype}, which this recording does not predict; "
        f"dry-run the job under the policy: memprof record --dry-run --{policy.describe()}."
    )


def refuse_compiled(step: Step, policy: Precision) -> None:
    """Rejects a step with code that torch.compile generated.

    Raises:
        PolicyError: Forward calls such code.
    """
    if reason := why_not_compiled(step, policy):
        raise PolicyError(reason)


def refuse_mixed_types(step: Step, types: Types) -> None:
    """Rejects a step in which a float32 tensor would meet a short one where torch requires a single type.

    Raises:
        PolicyError: There is such an operator; autocast itself would fail there.
    """
    uses = step.uses
    is_strict = is_one_of(types.names, ONE_TYPE) & (types.region != NONE)
    rows = is_strict[uses.op_id] & types.is_float[uses.storage_id] & (uses.role != "write")
    rows &= step.storages.shape[uses.storage_id] != ""
    is_short = types.is_short[uses.storage_id]
    counts = [np.bincount(uses.op_id[rows & kind], minlength=len(step.ops)) for kind in (is_short, ~is_short)]
    mixed = np.flatnonzero((counts[0] > 0) & (counts[1] > 0))
    if len(mixed):
        module = step.ops.module_id[mixed[0]]
        place = f" in {step.modules.name[module] or step.modules.type[module]}" if module != NONE else ""
        raise PolicyError(
            f"precision: {types.names[mixed[0]]}{place} would mix float32 and short operands, which "
            "torch's autocast rejects; cast one of them in the model (.to(other.dtype)), or leave the policy out."
        )


def refuse_rounded_integers(step: Step, types: Types, policy: Precision) -> None:
    """Rejects a step that casts integers to a floating point type and back, such as indices by ``x.new_tensor(rows)``.

    Raises:
        PolicyError: It does; a short type would round large ones.
    """
    uses, storages = step.uses, step.storages
    is_cast = is_one_of(types.names, ("_to_copy",)) & (types.region != NONE) & (types.forward == NONE)
    is_integer = np.isin(storages.dtype, _INDICES)
    rows = is_cast[uses.op_id]
    reads, writes = (np.flatnonzero(rows & (uses.role == role)) for role in _OPERANDS)
    of_integers = np.isin(uses.op_id[writes], uses.op_id[reads[is_integer[uses.storage_id[reads]]]])
    copies = uses.storage_id[writes[of_integers]]
    is_copy = np.isin(uses.storage_id[reads], copies[types.is_float[copies]])
    back = np.intersect1d(uses.op_id[reads[is_copy]], uses.op_id[writes[is_integer[uses.storage_id[writes]]]])
    if len(back):
        module = step.ops.module_id[back[0]]
        place = f" in {step.modules.name[module] or step.modules.type[module]}" if module != NONE else ""
        raise PolicyError(
            f"precision: integers are cast to a floating point type and back{place}; in {policy.dtype} those above "
            f"{_EXACT_INTEGERS[policy.dtype]} would be rounded. Keep them integers there, or leave the policy out."
        )


def refuse_sparse(step: Step, types: Types) -> None:
    """Rejects products with sparse tensors: the size of their copies in the short type is not recorded.

    Raises:
        PolicyError: There is such a product: it reads indices. One recorded before those were followed reads a single
            matrix, and its result is not that matrix times itself.
    """
    uses, shapes = step.uses, step.storages.shape
    is_product = is_one_of(types.names, _SPARSE_PRODUCTS) & (types.region != NONE) & (types.forward == NONE)
    for op in np.flatnonzero(is_product).tolist():
        rows = slice(*np.searchsorted(uses.op_id, [op, op + 1]))
        storages, roles = uses.storage_id[rows], uses.role[rows]
        is_index = np.isin(step.storages.dtype[storages[roles == "read"]], _INDICES)
        if np.any(is_index) and not np.all(is_index):  # else a product of integers
            raise PolicyError(_why_not_sparse(str(types.names[op])))
        read, made = ([str(shapes[i]) for i in storages[roles == role]] for role in _OPERANDS)
        if str(types.names[op]) != "mm" or len(read) != 1 or len(made) != 1:
            continue
        high, _, wide = read[0].partition("x")
        if made[0] not in (f"{high}x{high}", f"{wide}x{wide}"):
            raise PolicyError(_why_not_sparse("mm"))


def _why_not_sparse(name: str) -> str:
    reason = (
        "the recording does not contain the size of its short copy"
        if name in _CAST_PRODUCTS
        else "autocast casts none of its operands, which must have one type"
    )
    return f"precision: unsupported: aten.{name} with a sparse tensor, because {reason}; leave the policy out."


def refuse_unscaled(step: Step, types: Types) -> None:
    """Rejects a loss whose gradients loss scaling would lose, or scale twice.

    Raises:
        PolicyError: Backward runs through gradients of the model, or part of the loss reads parameters outside it.
    """
    ops, uses = step.ops, step.uses
    has_forward = types.forward != NONE
    is_scaled = has_forward & (types.region[types.forward] != NONE) & (ops.phase == "backward")
    if np.any(has_forward & is_scaled[types.forward]):
        raise PolicyError(CREATE_GRAPH)
    is_parameter = (step.storages.category == "parameter") & of_trained_models(step)
    is_outside = (ops.phase == "forward") & (types.region == NONE) & (ops.module_id == NONE)
    reads = np.unique(uses.op_id[is_parameter[uses.storage_id] & (uses.role == "read") & is_outside[uses.op_id]])
    goes_round = (ops.phase == "backward") & np.isin(types.forward, reads)
    if np.isin(ops.micro_batch[goes_round], ops.micro_batch[is_scaled]).any():
        raise PolicyError(NOT_OF_OUTPUT)


def refuse_recurrent(step: Step, types: Types, policy: Precision) -> None:
    """Rejects recurrent layers on a processor without a trainable oneDNN kernel for them in the short type.

    Raises:
        PolicyError: There are such layers.
    """
    is_inside = types.region != NONE
    has_recurrent = bool(np.any(is_inside & (types.names == "mkldnn_rnn_layer")))
    if policy.dtype == "fp16":
        called = np.unique(step.ops.module_id[is_inside & (step.ops.module_id != NONE)])
        has_recurrent |= bool(np.any(is_one_of(step.modules.type[called], RECURRENT)))
    if types.device == "cpu" and has_recurrent:
        require_recurrent(policy, step.short_types)


def require_recurrent(policy: Precision, short_types: Sequence[str]) -> None:
    """Rejects training recurrent layers on a CPU in a short type without a oneDNN kernel.

    Args:
        policy: The policy.
        short_types: Short types that oneDNN supports on the processor.

    Raises:
        PolicyError: The type is fp16 or unsupported.
    """
    if policy.dtype == "fp16":  # oneDNN has no such training primitive, and torch no other path in autocast
        raise PolicyError("precision: torch cannot train recurrent layers in fp16 on a CPU; write dtype = 'bf16'.")
    if SHORT_TYPES[policy.dtype] not in short_types:
        raise PolicyError(
            f"precision: torch cannot train recurrent layers in {policy.dtype} on this processor (oneDNN has no "
            "kernels for it); leave the policy out."
        )
