"""Derives the plan keys of saved tensors from a recorded step; the job generates the same ones."""

from __future__ import annotations

from collections import Counter

from memprof.trace.schema import NONE, Texts
from memprof.trace.step import Step


def key_of(module: str, operator: str, number: int) -> str:
    """Returns the key of one run of an operator: ``layers.0.mlp.0:aten.addmm.default:0``.

    Args:
        module: Name of the innermost module that runs it, "" outside of modules or for the root.
        operator: The operator.
        number: Number of earlier runs of the operator in that module, within this call of the model.
    """
    return f"{module}:{operator}:{number}"


def keys_of(step: Step) -> list[str]:
    """Returns the key of each operator of a step in its first forward run, "" for all others."""
    ops = step.ops
    modules: Texts = step.modules.name
    counts: Counter[tuple[int, str, str]] = Counter()
    keys = []
    for phase, again, module, name, part in zip(
        ops.phase.tolist(),
        ops.is_recompute.tolist(),
        ops.module_id.tolist(),
        ops.name.tolist(),
        ops.micro_batch.tolist(),
        strict=True,
    ):
        if phase != "forward" or again:
            keys.append("")
            continue
        title = str(modules[module]) if module != NONE else ""
        number = counts[part, title, name]
        counts[part, title, name] = number + 1
        keys.append(key_of(title, name, number))
    return keys
