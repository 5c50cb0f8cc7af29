"""The input shapes of a step, used to find comparable steps of two runs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memprof.trace.step import Step


def input_shapes(step: Step, phases: Iterable[str] = ("forward",)) -> tuple[str, ...]:
    """Returns the distinct shapes of the inputs that a step reads; of all inputs where uses were not recorded.

    Args:
        step: The step.
        phases: The phases in which they are read.
    """
    storages, uses = step.storages, step.uses
    is_input = (storages.category == "input") & (storages.shape != "")
    if len(uses):
        is_read = np.zeros(len(storages), dtype=np.bool_)
        is_read[uses.storage_id[np.isin(step.ops.phase[uses.op_id], list(phases))]] = True
        is_input &= is_read
    return tuple(sorted(set(storages.shape[is_input].tolist())))


def ran_on(step: Step) -> str:
    """Returns the inputs of a step in words: the input shapes of its model, and separately those of evaluations in it.

    Two steps that differ in this are not comparable, whatever their peaks. "" where no input was recorded.
    """
    trained, evaluated = (input_shapes(step, [phase]) for phase in ("forward", "evaluation"))
    words = [", ".join(trained)] if trained else []
    if evaluated and len(step.uses):
        words.append(f"{', '.join(evaluated)} in evaluation")
    return "; ".join(words)
