"""Emitted arguments are those of the installed Lightning's Trainer, and train under the plan."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import memprof
from memprof.emit.emission import Emitted, Request
from memprof.emit.registry import target_named
from memprof.policies.plan.plan_file import parse_plan
from memprof.replay.live import live_bytes
from tests.emit.running import recorded
from tests.policies.faces import load_job

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
lightning: Any = None

OWN = {
    "max_steps": 3,
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Imports Lightning in the one worker that runs these tests, not in each that collects them."""
    global lightning  # noqa: PLW0603
    import lightning.pytorch as lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net:
    """The GPT of tests/policies, as Lightning trains it; the first base class, in front of Lightning's."""

    def __init__(self) -> None:
        super().__init__()
        self.job = load_job("gpt")
        self.model = self.job.make_model()
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.job.loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.job.make_optimizer(self.model)  # type: ignore[no-any-return]


def emit(text: str, **request: Any) -> Emitted:
    return target_named("lightning").emit(Request(parse_plan(text), "plan.toml", **request))


def scope_of(emitted: Emitted) -> dict[str, Any]:
    scope: dict[str, Any] = {}
    exec(compile(emitted.text, "under_plan.py", "exec"), scope)
    return scope


def train(text: str, *, is_emitted: bool, batch: int = 8) -> tuple[list[float], int]:
    """Trains as emitted, or under the plan as memprof applies it; returns the losses and a step's peak."""
    torch.manual_seed(0)
    loader, net = load_job("gpt").make_loader(), type("Net", (Net, lightning.LightningModule), {})()
    loader = torch.utils.data.DataLoader(loader.dataset, batch_size=batch)
    job, trainer = None, lightning.Trainer
    if is_emitted:
        scope = scope_of(emit(text))
        trainer = scope["trainer"]
        if "prepare" in scope:
            scope["prepare"](net.model)
    elif text:
        job = memprof.apply(parse_plan(text), net.model)
    made = trainer(**OWN)
    step = recorded(lambda: made.fit(net, loader), 3)
    if job is not None:
        job.undo()
    return net.losses, int(live_bytes(step).during.max())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow  # the code around the model is that of test_pytorch.py
def test_what_has_no_argument_is_code_around_the_model() -> None:
    """The same losses and the same peak to the byte as under the plan."""
    text = "[checkpoint]\nmodules = ['layers.*']\nkeep = ['matmul']"
    assert train(text, is_emitted=True) == train(text, is_emitted=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow  # that the Trainer takes the arguments is held below
def test_arguments_train_as_the_plan_says() -> None:
    """Two parts of four in bf16: the mean of their losses is the batch's, to the type's rounding, in less memory.

    Lightning runs the loss under autocast too, and updates after every second part.
    """
    text = "[precision]\ndtype = 'bf16'\n[accumulate]\nmicro_batches = 2"
    parts, peak = train(text, is_emitted=True, batch=4)
    whole, whole_peak = train("", is_emitted=False)
    means = [(first + second) / 2 for first, second in zip(parts[::2], parts[1::2], strict=True)]
    assert means == pytest.approx(whole, abs=0.02)
    assert peak < 0.7 * whole_peak


def test_precision_is_an_argument() -> None:
    """The Trainer takes its own name of the type; of fp16 on a CPU it says that it takes bf16 in its place."""
    assert scope_of(emit("[precision]\nweights = 'bf16'"))["trainer"](**OWN).precision == "bf16-true"
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        scope_of(emit("[precision]\ndtype = 'fp16'"))["trainer"](**OWN)


def test_shards_are_a_strategy() -> None:
    """DDP in stage 0; fully_shard on the mesh of Lightning's strategy in 2 and 3, with the statements of fsdp2."""
    assert scope_of(emit("[shard]\nstage = 0\nworld_size = 2"))["trainer"](**OWN).num_devices == 2
    plan = "[shard]\nworld_size = 2"
    scope = scope_of(emit(plan))
    made = scope["trainer"](**OWN)
    assert type(made.strategy).__name__ == "ModelParallelStrategy"
    divide = emit(plan).text.partition("def shard(model, mesh):")[2].partition("\n\n\n")[0].strip("\n").split("\n")[1:]
    other = target_named("fsdp2").emit(Request(parse_plan(plan), "plan.toml")).text
    assert len(divide) == 5
    assert "\n".join(divide) in other


def test_what_makes_the_optimizer_is_said_to_do_so() -> None:
    """No argument of Trainer changes an optimizer."""
    emitted = emit("[swap]\nwhat = 'optimizer'\n[optimizer]\nloop = 'fused'")
    assert emitted.expressed == 0
    assert all("configure_optimizers()" in sentence for sentence in emitted.cannot)
