"""Small training jobs for tests, recorded in this process with and without a policy."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

import memprof
from memprof.policies.runtime.job import Job
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.policies.faces import one_thread


@dataclass
class Small:
    """A training job: its models, their optimizers, and one step of it; ``frozen`` models are called, not trained."""

    models: list[nn.Module]
    step: Callable[[], None]
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)


def record(make: Callable[[], Small], folder, policy=None) -> Step:
    """Records a steady step, under a policy applied to every model as `memprof record` does, or plain."""
    with one_thread():
        torch.manual_seed(0)
        job = make()
        applied = [Job(model, job.optimizers) for model in job.models] if policy else []
        for one in applied:
            policy.apply(one)
        path = folder / f"{'head' if policy else 'base'}.memprof"
        gc.collect()  # the models of tests before, which are in circles, are not of this job
        with memprof.record(path, skip=2, steps=1, force=True) as recorder:
            for _ in range(4):
                job.step()
                recorder.step()
        for one in reversed(applied):
            one.undo()
    return Trace.open(path).steady_step()


def peak(step: Step) -> int:
    return int(live_bytes(step).during.max())


def supervised(model: nn.Module, shape: tuple[int, ...], kind=torch.optim.SGD, **settings) -> Small:
    optimizer = kind(model.parameters(), lr=0.01, **settings)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(shape)).pow(2).mean().backward()
        optimizer.step()

    return Small([model], step, [optimizer])
