"""Finds what ran in code that torch.compile generated, where only part of what a policy changes can be predicted.

Such code fuses operators, saves tensors for backward when all of them have run, and reuses memory in between. A
recording shows its buffers and kernels, but not where they are allocated in C++. ``runtime.compiled_modules`` finds
which modules of a running job are compiled.
"""

from __future__ import annotations

import re

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.rewrite.stack_marks import ran_within
from memprof.trace.schema import Bools
from memprof.trace.step import Step
from memprof.trace.usages import COMPILES_MODELS

#: Error where a policy would change which tensors generated code saves.
SAVES_ITSELF = (
    "{what} runs code that torch.compile generates, which decides by itself what is saved for backward, so {policy} "
    "has no predictable effect there: leave it out, choose modules that are not compiled, or give the compiler a "
    "budget with memprof suggest --compile."
)

#: In the stack of every operator that inductor's code calls.
_INDUCTOR = re.compile(r"[/\\]torch[/\\]_inductor[/\\]output_code\.py:")
#: In that of every operator that AOTAutograd's graph runs, also with backends that generate no code.
_GRAPH = re.compile(r"[/\\]torch[/\\]_functorch[/\\]_aot_autograd[/\\]\w+\.py:")
#: Name of what a compiled model allocates outside of its operators, as where generated code allocates in C++.
_UNKNOWN = "compiled region"
#: Operators of generated code itself: its kernels, and its allocations. A recording on a GPU shows the latter alone.
_SHOWN = ("inductor.", "aten.empty_strided")


def is_in_compiled_code(step: Step) -> Bools:
    """Marks the operators that ran in compiled graphs, and what these allocated outside any, shape ``(ops,)``.

    All that a graph saves for backward it saves when it ends, whatever its backend.
    """
    marked: Bools = ran_within(step, _INDUCTOR) | ran_within(step, _GRAPH) | (step.ops.name == _UNKNOWN)
    return marked


def may_be_compiled(step: Step) -> Bools:
    """Marks the operators that run in generated code here, or in a real run of the job, shape ``(ops,)``.

    A dry run compiles nothing on a virtual GPU, or where it does not support the compiler. Which of its operators a
    real run compiles is not recorded.
    """
    if COMPILES_MODELS in step.usages:
        return np.ones(len(step.ops), dtype=np.bool_)
    return is_in_compiled_code(step)


def require_kernels(step: Step) -> None:
    """Rejects a step with generated code whose kernels are unknown, and with them the sizes of what they compute.

    Raises:
        PolicyError: The recording does not show them: that of a real run with code in C++, or on a GPU.
    """
    is_inside = ran_within(step, _INDUCTOR) | (step.ops.name == _UNKNOWN)
    shown = _SHOWN[:1] if step.is_on_device() else _SHOWN
    if is_inside.any() and not any(str(name).startswith(shown) for name in set(step.ops.name[is_inside])):
        raise PolicyError(
            "The recording shows only part of what code that torch.compile generated computes, so what grows with the "
            "batch is unknown: dry-run the job with memprof record --dry-run, and use that recording."
        )
