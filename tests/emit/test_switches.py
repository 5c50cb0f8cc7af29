"""The page of a plan names the settings that the job's own trainer has for it."""

from __future__ import annotations

import pytest

from memprof.emit.switches import switches_of
from memprof.policies.plan.plan_file import parse_plan
from memprof.trace.step import Step
from tests.building import Op, Storage, make_step

_TRAINER = "/site-packages/transformers/trainer.py:2164:compute_loss"


def step_in(*frames: str) -> Step:
    """Returns a step whose one operator runs below these frames, innermost first."""
    return make_step([Op(makes=["x"], stack="\n".join(("model.py:3:forward", *frames)))], [Storage("x", 4)])


@pytest.mark.parametrize(
    ("frames", "target", "words"),
    [
        (
            (_TRAINER, "train.py:9:<module>"),
            "hf",
            (
                "TrainingArguments: bf16=True, activation_checkpointing=True, "
                "activation_checkpointing_kwargs={'offload': True}"
            ),
        ),
        (
            ("/site-packages/trl/trainer/sft_trainer.py:1420:training_step", _TRAINER, "train.py:9:<module>"),
            "trl",
            (
                "SFTConfig: bf16=True, gradient_checkpointing=True, "
                "gradient_checkpointing_kwargs={'use_reentrant': False, 'offload': True}"
            ),
        ),
        (
            ("/site-packages/lightning/pytorch/loops/fit_loop.py:240:advance",),
            "lightning",
            'Lightning\'s Trainer: precision="bf16-mixed"',
        ),
    ],
)
def test_settings_are_those_of_the_trainer_that_ran(frames: tuple[str, ...], target: str, words: str) -> None:
    """TRL's trainer runs inside transformers' and goes first; what a trainer has no setting for is not named."""
    plan = parse_plan("[precision]\n[checkpoint]\nmodules = ['layers.*']\n[swap]\nmodules = ['layers.*']")
    found = switches_of(step_in(*frames), plan)
    assert found is not None
    assert (found.target, found.words) == (target, words)


def test_a_loop_of_ones_own_has_no_settings() -> None:
    """Nothing is named either where a trainer has no setting for any of the plan's policies."""
    assert switches_of(step_in("train.py:9:<module>"), parse_plan("[precision]")) is None
    some = parse_plan("[checkpoint]\nmodules = ['layers.0']")
    assert switches_of(step_in(_TRAINER), some) is None
