"""Reduced precisions that a search tries."""

from __future__ import annotations

from memprof.policies.base import Candidates
from memprof.policies.precision.misfits import product_types, short_types, why_not_compiled
from memprof.policies.precision.policy import NO_BF16, Precision
from memprof.trace.step import Step


def candidates(step: Step, world_size: int) -> Candidates:
    """Returns the applicable reduced precisions: none where the job already computes in one.

    What counts is the type of the numbers: fused attention also writes the state of its random numbers, as integers.
    """
    types = product_types(step)
    bf16 = Precision("bf16")
    if reason := why_not_compiled(step, bf16):
        return Candidates(unsuitable={bf16: reason})
    if reduced := short_types(types):
        return Candidates(unsuitable={bf16: f"the job's matrix products are in {reduced} already."})
    if not types & {"float32", "float64"}:
        return Candidates(unsuitable={bf16: "forward has no matrix products or convolutions in float32."})
    return Candidates((bf16,)) if step.runs_bf16() else Candidates((Precision("fp16"),), {bf16: NO_BF16})
