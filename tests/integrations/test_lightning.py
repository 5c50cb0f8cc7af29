"""Recording Lightning's Trainer through its callback."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from memprof.errors import PolicyError
from memprof.replay.live import live_bytes
from memprof.trace.schema import Steps
from memprof.trace.store import Trace

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]
lightning: Any = None
MemprofCallback: Any = None

BATCH, WIDTH = 512, 64


@dataclass
class Trained:
    """What a training did."""

    losses: list[float] = field(default_factory=list)
    random: bytes = b""
    fit: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)
    predicted_bytes: int = 0


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Imports Lightning in the one worker that runs these tests, not in each that collects them."""
    global lightning, MemprofCallback  # noqa: PLW0603
    import lightning.pytorch as lightning

    from memprof.integrations.lightning import MemprofCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net:
    """A network of four blocks; with two optimizers it trains as an adversarial one does, by hand.

    It is the first base class, in front of Lightning's.
    """

    def __init__(self, losses: list[float], *, by_hand: bool = False, fails_at: int = -1) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU()) for _ in range(1)))
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4))
        )
        self.head = nn.Linear(2 * WIDTH, 4)
        self.losses, self.fails_at = losses, fails_at
        self.automatic_optimization = not by_hand

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.body(rows)))

    def training_step(self, batch: Any, number: int) -> torch.Tensor | None:
        if number == self.fails_at:
            raise ZeroDivisionError("the job's own")
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(functional.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()
        return None

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("validation", functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        if self.automatic_optimization:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [torch.optim.SGD(part.parameters(), lr=1e-3) for part in (self.blocks, self.head)]


def train(callback: Any = None, *, batch: int = BATCH, net: dict[str, Any] | None = None, **changes: Any) -> Trained:
    """Trains for ten batches, with a validation in the middle."""
    torch.manual_seed(0)
    done = Trained()
    data = TensorDataset(torch.randn(10 * BATCH, WIDTH), torch.randint(0, 4, (10 * BATCH,)))
    arguments: dict[str, Any] = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "val_check_interval": 4,
        "limit_val_batches": 1,
        "callbacks": [] if callback is None else [callback],
    }
    model = type("Net", (Net, lightning.LightningModule), {})(done.losses, **(net or {}))
    trainer = lightning.Trainer(**(arguments | changes))
    trainer.fit(model, DataLoader(data, batch_size=batch), DataLoader(data, batch_size=BATCH))
    done.random = bytes(torch.get_rng_state().tolist())
    if callback is not None:  # which Lightning ties to the model
        done.fit, done.arguments, done.predicted_bytes = callback.fit, callback.arguments, callback.predicted_bytes
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def fitted(folder: Path) -> Trained:
    """A training recorded, and fitted to 80 % of what it needs."""
    done = train(MemprofCallback(folder / "run.memprof", budget="80%"))
    gc.collect()
    return done


def peak_of(path: Path) -> int:
    trace = Trace.open(path)
    return max(int(live_bytes(trace.step(number)).during.max()) for number in trace.recorded_steps)


def phases_of(path: Path) -> list[str]:
    """Lists the phases of the steady step in their order, what is in none left out."""
    phase = Trace.open(path).steady_step().ops.phase
    phase = phase[phase != "other"]
    return list(phase[np.flatnonzero(np.append(True, phase[1:] != phase[:-1]))])


def test_training_is_the_same_to_the_bit(fitted: Trained) -> None:
    """Losses and the state of the random numbers are those of the training without the callback."""
    gc.collect()
    plain = train()
    assert len(plain.losses) == 10
    assert fitted.losses == plain.losses
    assert fitted.random == plain.random


def test_closure_is_told_from_the_update(folder: Path, fitted: Trained) -> None:
    """Forward and backward run in the optimizer's closure, and log there without gradients: still forward."""
    trace = Trace.open(folder / "run.memprof")
    assert phases_of(folder / "run.memprof") == ["forward", "backward", "optimizer"]
    for number in trace.recorded_steps:
        trace.step(number).check()


def test_validation_is_left_out(folder: Path, fitted: Trained) -> None:
    """The validation after the fourth batch is inside the window, and part of no step."""
    trace = Trace.open(folder / "run.memprof")
    steps = trace.table(Steps)
    assert (steps.kind == "recorded").sum() == 3
    for number in trace.recorded_steps:
        step = trace.step(number)
        whole = np.flatnonzero(step.modules.type == "Net")
        assert np.isin(step.module_calls.module_id, whole).sum() == 1  # the model itself is called once a step


def test_arguments_make_it_fit(folder: Path, fitted: Trained) -> None:
    """The suggested arguments of Trainer lead to a peak within the budget, as predicted."""
    arguments = fitted.arguments
    assert arguments
    parts = arguments.get("accumulate_grad_batches", 1)
    gc.collect()
    train(MemprofCallback(folder / "with-arguments.memprof"), batch=BATCH // parts, **arguments)
    measured = peak_of(folder / "with-arguments.memprof")
    assert measured <= fitted.fit.budget_bytes
    assert fitted.predicted_bytes == pytest.approx(measured, rel=0.05)


def test_batches_accumulate_in_one_step(folder: Path) -> None:
    """All batches up to an update are one step, and the one that a validation cuts in two is left out."""
    path = folder / "accumulated.memprof"
    gc.collect()
    train(MemprofCallback(path, skip=1, steps=1), accumulate_grad_batches=3, val_check_interval=5)
    assert phases_of(path) == ["forward", "backward"] * 3 + ["optimizer"]


def test_round_of_all_optimizers_is_a_step(folder: Path) -> None:
    """With manual optimization a step ends after the last optimizer's update."""
    path = folder / "by-hand.memprof"
    gc.collect()
    train(MemprofCallback(path), net={"by_hand": True})
    steps = Trace.open(path).table(Steps)
    assert set(steps.optimizer_updates[steps.kind == "recorded"]) == {2}


def test_plan_is_applied(folder: Path, fitted: Trained) -> None:
    """A plan given to the callback is applied to the module, and the losses stay as they are."""
    path = folder / "checkpointed.toml"
    path.write_text("[checkpoint]\nmodules = ['blocks.*']\n")
    gc.collect()
    under = train(MemprofCallback(folder / "under.memprof", plan=path))
    assert under.losses == fitted.losses
    assert peak_of(folder / "under.memprof") < fitted.fit.recorded_bytes


def test_plan_that_the_trainer_must_do_is_refused(folder: Path) -> None:
    """Precision is the Trainer's own: the sentence says which argument to set, and no step runs."""
    path = folder / "short.toml"
    path.write_text("[precision]\ndtype = 'bf16'\n")
    with pytest.raises(PolicyError, match="bf16-mixed"):
        train(MemprofCallback(folder / "refused.memprof", plan=path))


def test_error_of_the_job_goes_on(folder: Path) -> None:
    """A training that fails raises its own error, and what was recorded until then can be read."""
    path = folder / "failed.memprof"
    gc.collect()
    with pytest.raises(ZeroDivisionError, match="the job's own"):
        train(MemprofCallback(path, skip=1, steps=3), net={"fails_at": 3})
    trace = Trace.open(path)
    assert trace.recorded_steps == (1, 2, 3)
    steps = trace.table(Steps)
    assert list(steps.is_complete[steps.kind == "recorded"]) == [True, True, False]
    assert not trace.manifest.capture.is_complete


def test_goes_with_the_older_name(tmp_path: Path) -> None:
    """Where a training imports pytorch_lightning, the callback is one of its."""
    pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")
    code = (
        "import pytorch_lightning as pl\n"
        "from memprof.integrations.lightning import MemprofCallback\n"
        "assert issubclass(MemprofCallback, pl.Callback)\n"
        "from pytorch_lightning.demos.boring_classes import BoringModel\n"
        "pl.Trainer(max_steps=8, accelerator='cpu', logger=False, enable_checkpointing=False,\n"
        "           enable_progress_bar=False, callbacks=[MemprofCallback('run.memprof')]).fit(BoringModel())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "memprof: recorded 3 steps" in done.stderr
