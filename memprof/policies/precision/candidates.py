"""Reduced precisions that a search tries."""

from __future__ import annotations

from memprof.policies.base import Candidates
from memprof.policies.precision.policy import Precision
from memprof.trace.step import Step


def candidates(step: Step, world_size: int) -> Candidates:
    """Returns the applicable reduced precisions: none where the job already computes in one.

    What counts is the type of the numbers: fused attention also writes the state of its random numbers, as integers.
    """
    is_matrix = (step.ops.flops > 0) & (step.ops.phase == "forward")
    wrote = step.uses.take(is_matrix[step.uses.op_id] & (step.uses.role == "write"))
    types = set(step.storages.dtype[wrote.storage_id])
    reduced = {name for name in types if name.startswith(("float8", "float16", "bfloat16", "complex32"))}
    is_full = bool(types & {"float32", "float64"}) and not reduced
    return Candidates((Precision("bf16"),) if is_full else ())
