"""Detects models that repeat a module as often as a number computed from the whole batch says."""

from __future__ import annotations

import numpy as np

from memprof.policies.accumulate.batch import computed_from, find_batch
from memprof.trace.schema import NONE, Bools
from memprof.trace.step import Step

#: Reads a number of one element into Python, as ``item()``, ``float()`` and ``if`` do.
_READ = "aten._local_scalar_dense.default"


def repeats_by_batch(step: Step) -> bool:
    """Returns whether forward calls a module again after reading a number that depends on all samples.

    Adaptive solvers of differential equations choose their next step by the error over the whole batch, and iterations
    end when a residual is small: each micro-batch would take other steps. The number is one float, or a comparison of
    such numbers, computed from inputs and parameters. Values that are read and only printed, after the last call of
    each module, and counts of elements do not matter.

    Args:
        step: A training step.

    Raises:
        PolicyError: No input shows the batch size.
    """
    ops, uses, calls = step.ops, step.uses, step.module_calls
    is_read = (ops.name == _READ) & (ops.phase == "forward") & (ops.module_id != NONE)
    if not np.any(is_read):
        return False
    decisive = _decisive(step)
    rows = is_read[uses.op_id] & decisive[uses.storage_id]
    for op in np.unique(uses.op_id[rows]).tolist():
        around = (calls.first_op_id <= op) & (calls.last_op_id >= op) & (calls.module_id == ops.module_id[op])
        for first, last in zip(calls.first_op_id[around].tolist(), calls.last_op_id[around].tolist(), strict=True):
            before = calls.module_id[(calls.first_op_id >= first) & (calls.last_op_id < op)]
            after = calls.module_id[(calls.first_op_id > op) & (calls.last_op_id <= last)]
            if len(np.intersect1d(before, after)):
                return True
    return False


def _decisive(step: Step) -> Bools:
    """Returns the storages with one float computed from inputs and parameters, or a comparison of it: (storages,)."""
    uses, storages = step.uses, step.storages
    is_computed = find_batch(step).is_from_input & computed_from(step, storages.category == "parameter")
    is_number = (storages.shape == "") & (storages.created_op_id != NONE)
    is_float = np.array([str(dtype).startswith(("float", "bfloat")) for dtype in storages.dtype], dtype=np.bool_)
    is_float &= is_number & is_computed
    compares = np.zeros(len(step.ops) + 1, dtype=np.bool_)  # the last entry stands for NONE
    compares[uses.op_id[(uses.role == "read") & is_float[uses.storage_id]]] = True
    decisive: Bools = is_float | (is_number & (storages.dtype == "bool") & compares[storages.created_op_id])
    return decisive
