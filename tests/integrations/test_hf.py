"""Recording the Trainer of transformers through its callback."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from memprof.errors import PolicyError, UsageError
from memprof.integrations import session as session_module
from memprof.policies.plan.plan_file import read_plan
from memprof.replay.live import live_bytes
from memprof.trace.schema import Steps
from memprof.trace.store import Trace

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from memprof.integrations.hf import MemprofCallback  # noqa: E402 - it imports transformers

LENGTH, VOCABULARY, LAYERS = 32, 256, 2


@dataclass
class Trained:
    """What a training did, and what came of it."""

    losses: list[float]
    random: bytes
    callback: Any


def train(folder: Path, callback: Any = None, **changes: Any) -> Trained:
    """Trains a small GPT-2 for nine steps."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=48,
        n_layer=LAYERS,
        n_head=3,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    rows = [torch.randint(0, VOCABULARY, (LENGTH,)) for _ in range(32)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": 9,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**(arguments | changes)),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=[] if callback is None else [callback],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Trained(losses, bytes(torch.get_rng_state().tolist()), callback)


ACCUMULATED: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Trained:
    """A training as it is."""
    return train(folder)


@pytest.fixture(scope="module")
def fitted(folder: Path, plain: Trained) -> Trained:
    """The same, recorded, and fitted to 70 % of what it needs."""
    gc.collect()
    return train(folder, MemprofCallback(folder / "run.memprof", budget="70%"))


@pytest.fixture(scope="module")
def accumulated(folder: Path) -> Trained:
    """A training that accumulates, and evaluates in the middle of the recorded steps."""
    gc.collect()
    return train(folder, MemprofCallback(folder / "accumulated.memprof"), **ACCUMULATED)


def peak_of(path: Path) -> int:
    trace = Trace.open(path)
    return max(int(live_bytes(trace.step(number)).during.max()) for number in trace.recorded_steps)


def test_training_is_the_same_to_the_bit(plain: Trained, fitted: Trained) -> None:
    """Losses and the state of the random numbers are those of the training without the callback."""
    assert len(plain.losses) == 9
    assert fitted.losses == plain.losses
    assert fitted.random == plain.random


def test_recorded_steps_are_the_trainers(folder: Path, fitted: Trained) -> None:
    """Steps 2 to 4 are recorded: forward, backward, one update."""
    trace = Trace.open(folder / "run.memprof")
    assert trace.recorded_steps == (2, 3, 4)
    for number in trace.recorded_steps:
        step = trace.step(number)
        step.check()
        assert set(step.ops.phase) >= {"forward", "backward", "optimizer"}
    steps = trace.table(Steps)
    assert set(steps.optimizer_updates[steps.kind == "recorded"]) == {1}
    assert trace.manifest.capture.is_complete


@pytest.mark.slow
def test_arguments_make_it_fit(folder: Path, fitted: Trained) -> None:
    """The suggested TrainingArguments lead to the predicted peak, which is within the budget."""
    fit, arguments = fitted.callback.fit, fitted.callback.arguments
    assert fit.budget_bytes == pytest.approx(0.7 * fit.recorded_bytes, abs=1)
    assert arguments
    gc.collect()
    train(folder, MemprofCallback(folder / "with-arguments.memprof"), **arguments)
    measured = peak_of(folder / "with-arguments.memprof")
    assert measured <= fit.budget_bytes
    assert fitted.callback.predicted_bytes == pytest.approx(measured, rel=0.05)


def test_plan_is_applied_and_met(folder: Path, fitted: Trained, capfd: pytest.CaptureFixture[str]) -> None:
    """A plan given to the callback is applied before the first step, and its prediction compared with the run."""
    plan = read_plan(folder / "plan.toml")
    assert plan.prediction is not None
    assert plan.prediction.peak_allocated_bytes <= fitted.callback.fit.budget_bytes
    path = folder / "checkpointed.toml"
    path.write_text("[checkpoint]\nmodules = ['transformer.h.*']\n")
    gc.collect()
    under = train(folder, MemprofCallback(folder / "under.memprof", plan=path))
    assert Trace.open(folder / "under.memprof").manifest.plan is not None
    assert peak_of(folder / "under.memprof") < 0.8 * fitted.callback.fit.recorded_bytes
    assert under.losses == fitted.losses  # dropout draws the same numbers again
    predicted, _ = fitted.callback.fit.basis.predict(read_plan(path))
    assert predicted.prediction is not None
    # The Trainer's own running sums, of 4 bytes each, are not the same in every step.
    assert predicted.prediction.peak_allocated_bytes == pytest.approx(peak_of(folder / "under.memprof"), abs=16)
    assert under.callback._job is None  # taken back


def test_plan_that_the_trainer_must_do_is_refused(folder: Path) -> None:
    """Micro-batches are the Trainer's own: the sentence says which arguments to set, and no step runs."""
    path = folder / "split.toml"
    path.write_text("[accumulate]\nmicro_batches = 2\n")
    with pytest.raises(PolicyError, match="gradient_accumulation_steps"):
        train(folder, MemprofCallback(folder / "refused.memprof", plan=path))
    assert not (folder / "refused.memprof").exists()


def test_micro_batches_are_one_step(folder: Path, accumulated: Trained) -> None:
    """Under gradient accumulation a step has two forwards, two backwards and one update."""
    trace = Trace.open(folder / "accumulated.memprof")
    step = trace.steady_step()
    changes = np.flatnonzero(np.append(True, step.ops.phase[1:] != step.ops.phase[:-1]))
    order = [phase for phase in step.ops.phase[changes] if phase != "other"]
    assert order == ["forward", "backward", "forward", "backward", "optimizer"]
    steps = trace.table(Steps)
    assert set(steps.micro_batches[steps.kind == "recorded"]) == {2}


def test_evaluation_is_left_out(folder: Path, accumulated: Trained) -> None:
    """An evaluation within the window is part of no step, and changes no step's peak."""
    gc.collect()
    assert accumulated.losses == train(folder, **ACCUMULATED).losses
    gc.collect()
    train(folder, MemprofCallback(folder / "without.memprof"), **{**ACCUMULATED, "eval_strategy": "no"})
    evaluated, plain = (Trace.open(folder / f"{name}.memprof") for name in ("accumulated", "without"))
    steps = evaluated.table(Steps)
    assert (steps.kind == "recorded").sum() == 3
    assert 0 < len(evaluated.recorded_steps) < 3  # those of one side of the evaluation are told
    wanted = plain.steady_step()
    for number in evaluated.recorded_steps:
        step = evaluated.step(number)
        step.check()
        assert (step.ops.phase == "backward").sum() == (wanted.ops.phase == "backward").sum()
        assert (step.ops.phase == "forward").sum() == (wanted.ops.phase == "forward").sum()
    assert peak_of(folder / "accumulated.memprof") == pytest.approx(peak_of(folder / "without.memprof"), rel=0.001)


def test_evaluation_between_epochs_is_left_out(folder: Path) -> None:
    """With an evaluation after every epoch of four steps, no recorded step holds one."""
    path = folder / "epochs.memprof"
    gc.collect()
    train(folder, MemprofCallback(path), eval_strategy="epoch", max_steps=-1, num_train_epochs=3)
    trace = Trace.open(path)
    for number in trace.recorded_steps:
        step = trace.step(number)
        step.check()
        assert (step.ops.phase == "backward").any()
        first = int(np.flatnonzero(step.ops.phase == "forward")[0])
        assert not (step.ops.module_id[:first] >= 0).any()


def test_existing_file_leaves_the_training_alone(
    folder: Path, plain: Trained, fitted: Trained, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file that may not be replaced is reported, and the training continues unrecorded."""
    before = (folder / "run.memprof").read_bytes()
    gc.collect()
    again = train(folder, MemprofCallback(folder / "run.memprof"))
    assert again.losses == plain.losses
    assert "exists already" in capfd.readouterr().err
    assert (folder / "run.memprof").read_bytes() == before


def test_fault_of_ours_leaves_the_training_alone(
    folder: Path, plain: Trained, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever goes wrong when the recording is read, the training goes on to its end."""

    def fail(*_: Any) -> Any:
        raise RuntimeError("made up")

    monkeypatch.setattr(session_module, "find_fit", fail)
    gc.collect()
    again = train(folder, MemprofCallback(folder / "fault.memprof", budget="70%"))
    assert again.losses == plain.losses
    assert "fault of memprof" in capfd.readouterr().err


def test_next_training_has_a_file_of_its_own(folder: Path) -> None:
    """One callback records one training after another."""
    callback = MemprofCallback(folder / "twice.memprof", steps=1)
    for _ in range(2):
        gc.collect()
        train(folder, callback, max_steps=5)
    assert (folder / "twice.memprof").is_file()
    assert (folder / "twice.2.memprof").is_file()


@pytest.mark.parametrize(
    "wrong", [{"budget": "much"}, {"steps": 0}, {"skip": -1}, {"allow": ("checkpoint",)}, {"time_limit": 0}]
)
def test_mistakes_are_told_at_once(wrong: dict[str, Any]) -> None:
    """Invalid arguments are refused before any training."""
    make: Callable[..., Any] = MemprofCallback
    with pytest.raises(UsageError):
        make(**wrong)
