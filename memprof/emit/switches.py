"""The switches that the trainer of a recorded job has for a plan, and the model's own names of its modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memprof.emit.emission import Request
from memprof.emit.registry import target_named
from memprof.policies.accumulate.batch import runs_in
from memprof.policies.plan.plan import Plan, fitted
from memprof.policies.runtime.model_names import WRAPPERS
from memprof.trace.step import Step

#: Targets, what their arguments belong to, and a part of the files that run the trainer's loop; special ones first.
_TRAINERS = (
    ("trl", "SFTConfig", "trl/trainer/sft_trainer.py:"),
    ("hf", "TrainingArguments", "transformers/trainer.py:"),
    ("lightning", "Lightning's Trainer", "/pytorch/loops/"),
)


@dataclass(frozen=True)
class Switches:
    """What a trainer's own settings can do of a plan.

    Attributes:
        target: The target of `memprof emit` that writes them.
        words: Where they belong, and each as it is written in Python: ``TrainingArguments: bf16=True``.
    """

    target: str
    words: str


def switches_of(step: Step, plan: Plan) -> Switches | None:
    """Returns the settings for a plan of the trainer that ran a recorded step.

    Returns:
        None if the job's own loop trains, or the trainer has no setting for any of the plan's policies.
    """
    for name, owner, place in _TRAINERS:
        if runs_in(step, place):
            arguments = target_named(name).emit(Request(in_own_names(plan), "")).arguments
            words = ", ".join(f"{key}={_literal(value)}" for key, value in arguments.items())
            return Switches(name, f"{owner}: {words}") if words else None
    return None


def _literal(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def in_own_names(plan: Plan) -> Plan:
    """Returns a plan with the module names of the model it was predicted for.

    Recordings prefix names with ``module.`` for a wrapped model, and with the type for jobs with several models;
    memprof strips both when it applies a plan, emitted code does not.
    """
    model = plan.prediction.model if plan.prediction is not None else ""
    if model in WRAPPERS:
        return fitted(plan, set())
    if not model:
        return plan
    return plan.with_patterns(lambda pattern: pattern.removeprefix(f"{model}."))
