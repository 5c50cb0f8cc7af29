"""What plans that compile need to know of a job that compiles its model itself: nothing inside is predicted."""

from __future__ import annotations

import numpy as np

from memprof.policies.precision.policy import Precision
from memprof.policies.rewrite.stack_marks import may_be_compiled
from memprof.policies.runtime.model_names import module_names, without_wrappers
from memprof.replay.time import product_kinds
from memprof.trace.step import Step


def compiles_itself(step: Step) -> bool:
    """Returns whether forward runs code that the job compiles."""
    return bool(np.any(may_be_compiled(step) & (step.ops.phase == "forward")))


def short_precision(step: Step) -> tuple[Precision, ...]:
    """Returns the precision to try for a job that computes in float32; none for others."""
    is_product = (step.ops.flops > 0) & (step.ops.phase == "forward")
    kinds = set(product_kinds(step)[is_product])
    return (Precision("bf16" if step.runs_bf16() else "fp16"),) if kinds == {"fp32"} else ()


def repeated_layers(step: Step) -> tuple[str, ...]:
    """Returns the names of a model's layers: the list of modules of one type with the most parameters, in order."""
    modules, names = step.modules, [without_wrappers(name) for name in module_names(step)]
    inside = modules.parameter_bytes.copy()
    for row, parent in reversed(list(enumerate(modules.parent_id.tolist()))):  # parents precede their children
        if parent >= 0:
            inside[parent] += inside[row]
    lists: dict[tuple[int, str], list[int]] = {}
    for row, (parent, kind) in enumerate(zip(modules.parent_id.tolist(), modules.type.tolist(), strict=True)):
        if names[row].rpartition(".")[2].isdigit():
            lists.setdefault((parent, str(kind)), []).append(row)
    layers = max((rows for rows in lists.values() if len(rows) > 1), key=lambda rows: inside[rows].sum(), default=[])
    return tuple(names[row] for row in layers)
