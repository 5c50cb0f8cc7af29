"""What a step computes that depends on how often it runs: statistics, buffers, random draws, second derivatives."""

from __future__ import annotations

import re

import numpy as np

from memprof.policies.rewrite.stack_marks import ran_within
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step

_INSTANCE = re.compile(r"torch/nn/functional\.py:[0-9]+:instance_norm\b")


def batch_norms(step: Step) -> list[str]:
    """Returns the modules that normalise by statistics of their batch: not those in eval mode, nor InstanceNorm.

    In training the operator writes the statistics beside its result, in eval mode empty tensors.
    """
    ops, uses, storages = step.ops, step.uses, step.storages
    is_norm = np.array(["batch_norm" in str(name) for name in ops.name.tolist()], dtype=np.bool_)
    is_norm &= (ops.phase == "forward") & ~ops.is_recompute & ~ran_within(step, _INSTANCE)
    if not is_norm.any():
        return []
    rows = (uses.role == "write") & is_norm[uses.op_id] & (storages.requested_bytes[uses.storage_id] > 0)
    written = np.bincount(uses.op_id[rows], minlength=len(ops))
    modules = ops.module_id[is_norm & (written > 1)].tolist()
    return list(dict.fromkeys(str(step.modules.name[each]) if each != NONE else "" for each in modules))


def changed_buffers(step: Step) -> tuple[Ints, Ints]:
    """Returns the operators of forward that change a buffer in place, and the storages of the buffers, in order."""
    uses, storages = step.uses, step.storages
    is_change = (uses.role == "mutate") & (storages.category[uses.storage_id] == "buffer")
    is_change &= step.ops.phase[uses.op_id] == "forward"
    return uses.op_id[is_change], uses.storage_id[is_change]


def draws(step: Step) -> bool:
    """Returns whether forward draws random numbers, as dropout does."""
    return bool(np.any(step.ops.uses_rng & (step.ops.phase == "forward") & ~step.ops.is_recompute))
