"""Trains a job of tests/policies in this process, plainly, under a plan, or as emitted code has it, and records it."""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import memprof
from memprof.emit.targets.pytorch import INTRODUCTION
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job
from memprof.replay.live import live_bytes
from memprof.trace.schema import Steps
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.policies.faces import load_job

_PLAIN_LOOP = """
for batch in loader:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
"""


@dataclass(frozen=True)
class Ran:
    """The results of a run.

    Attributes:
        losses: The loss of each forward.
        state: A digest of the model's parameters and buffers at the end.
        step: The steady step that was recorded.
    """

    losses: tuple[float, ...]
    state: str
    step: Step

    @property
    def peak_bytes(self) -> int:
        """The step's peak."""
        return int(live_bytes(self.step).during.max())


def loop_in(text: str) -> str:
    """Returns the training loop that stands in the docstring of emitted code."""
    lines = text.partition(INTRODUCTION)[2].strip("\n").split("\n")
    return textwrap.dedent("\n".join(itertools.takewhile(lambda line: line.startswith("    "), lines)))


def run(name: str, *, plan: Plan | None = None, text: str = "", steps: int = 3) -> Ran:
    """Trains a job from its seed: under a plan that memprof applies, or with emitted code and its loop."""
    job = load_job(name)
    with _one_thread():
        torch.manual_seed(0)
        loader, model = job.make_loader(), job.make_model()
        optimizer = job.make_optimizer(model)
        losses: list[float] = []

        def loss_of(model: Any, batch: Any) -> torch.Tensor:
            loss = job.loss_of(model, batch)
            losses.append(loss.item())
            return loss

        applied, parts, loop = Job(model, [optimizer]), 1, _PLAIN_LOOP
        scope: dict[str, Any] = {"model": model, "optimizer": optimizer, "loss_of": loss_of, "torch": torch}
        if plan is not None:
            plan.apply(applied)
            parts = math.prod(getattr(policy, "micro_batches", 1) for policy in plan.policies)
        elif text:
            exec(compile(text, "under_plan.py", "exec"), scope)
            scope["scaler"], loop = scope["prepare"](model, optimizer), loop_in(text)
        scope["loader"] = itertools.islice(loader, steps * parts)
        step = recorded(lambda: exec(compile(loop, "loop.py", "exec"), scope), steps)
        state = hashlib.sha256()
        for value in model.state_dict().values():
            state.update(value.detach().float().numpy().tobytes())
        applied.undo()
        for parameter in model.parameters():  # else the optimizer lives on, and recordings after this one find it
            (parameter._post_accumulate_grad_hooks or {}).clear()  # type: ignore[attr-defined]
        scope.clear()
        return Ran(tuple(losses), state.hexdigest(), step)


def recorded(train: Any, steps: int) -> Step:
    """Records training for this many steps, and returns a steady step of it."""
    with _trace_of(train, steps) as trace:
        return trace.steady_step()


def lowest_peak(train: Any, steps: int) -> int:
    """Records training for this many steps, and returns the lowest peak of the complete ones after the first two.

    For ranks: threads of gloo sometimes hold the buffers of a collective for a moment after it has ended, which adds
    them to the peak of that step.
    """
    with _trace_of(train, steps) as trace:
        steps = trace.table(Steps)
        complete = steps.step[steps.is_complete & (steps.kind == "recorded")]
        return min(int(live_bytes(trace.step(int(number))).during.max()) for number in complete)


@contextmanager
def _trace_of(train: Any, steps: int) -> Iterator[Trace]:
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.memprof"
        with memprof.record(path, skip=2, steps=steps - 2):
            train()
        yield Trace.open(path)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
