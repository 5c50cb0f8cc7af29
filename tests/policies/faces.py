"""Records one of the jobs with and without a plan, in this process, so that prediction and measurement can be compared.

`python -m tests.policies.faces gpt plan.toml` prints the comparison, operator by operator where they differ.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import pickle
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

import memprof
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job
from memprof.replay.live import alive_at, live_bytes, peak_op
from memprof.trace.step import Step
from memprof.trace.store import Trace

JOBS = ("gpt", "resnet", "lstm", "vit", "unet", "shared")


@dataclass(frozen=True)
class Trained:
    """The results of a run: compared to the bit between a plain run and one under a plan."""

    losses: tuple[float, ...]
    state: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]


def load_job(name: str) -> ModuleType:
    """Imports one of the job scripts."""
    return importlib.import_module(f"tests.policies.jobs.{name}")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Runs operators on one thread: the workspaces of the processor's kernels depend on the number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train(name: str, plan: Plan | None = None, *, steps: int = 3, record: Path | None = None) -> Trained:
    """Trains a job from its seed, under a plan or plain, recorded or not."""
    job = load_job(name)
    with one_thread():
        torch.manual_seed(0)
        loader = job.make_loader()
        model = job.make_model()
        optimizer = job.make_optimizer(model)
        gc.collect()
        applied = Job(model, [optimizer])
        if plan is not None:
            plan.apply(applied)
        # Under accumulate the loop sees micro-batches, so many to a step.
        parts = math.prod(getattr(policy, "micro_batches", 1) for policy in (plan.policies if plan else ()))
        losses = []

        def run() -> None:
            for step, batch in enumerate(loader):
                if step == steps * parts:
                    break
                optimizer.zero_grad()
                loss = job.loss_of(model, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                del loss, batch

        if record is None:
            run()
        else:
            gc.collect()  # the models of tests before, which are in circles, are not of this job
            with memprof.record(record, skip=2, steps=steps - 2):
                run()
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        state = {key: value.detach().clone() for key, value in model.state_dict().items()}
        applied.undo()
        return Trained(tuple(losses), state, gradients)


def record_step(name: str, plan: Plan | None = None) -> Step:
    """Records a steady step of a job, under a plan or plain."""
    # The one element that stands for all that is moved out is made once in a process, and only under a plan that moves.
    # What tests have left alive is not of this job: the recorder does not find what the collector does not see.
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.memprof"
        train(name, plan, steps=5, record=path)
        step = Trace.open(path).steady_step()
        step.check()
        return step


def trained(name: str) -> Trained:
    """Trains a job as it is, once for all tests of this process.

    Only bytes are kept in between: tensors that are alive would be in the recordings of later tests.
    """
    found: Trained = pickle.loads(_trained(name))
    return found


@cache
def _trained(name: str) -> bytes:
    return pickle.dumps(train(name))


@cache
def recorded(name: str) -> Step:
    """Records a steady step of a job as it is, once for all tests of this process, none of which may change it."""
    return record_step(name)


def peaks(step: Step) -> tuple[int, str]:
    """Returns the peak and the phase it is in."""
    return int(live_bytes(step).during.max()), str(step.ops.phase[peak_op(step)])


def compare(predicted: Step, measured: Step) -> str:
    """Tells where two steps differ: peaks, what is alive there, and the operators one has and the other has not."""
    lines = []
    for what, step in (("predicted", predicted), ("measured", measured)):
        during, op = live_bytes(step).during, peak_op(step)
        lines.append(
            f"{what}: peak {during[op]:,} at operator {op} of {len(step.ops)}, {step.ops.phase[op]} "
            f"{step.ops.name[op]} of {module_name(step, op)}, workspace {step.ops.workspace_bytes[op]:,}; "
            f"at start {step.bytes_at_start():,}"
        )
    alive = [Counter(describe_alive(step, peak_op(step))) for step in (predicted, measured)]
    lines += [f"  only predicted alive: {text} x{count}" for text, count in (alive[0] - alive[1]).items()]
    lines += [f"  only measured alive:  {text} x{count}" for text, count in (alive[1] - alive[0]).items()]
    names = [Counter(zip(step.ops.phase, step.ops.name, strict=True)) for step in (predicted, measured)]
    lines += [f"  only predicted runs: {text} x{count}" for text, count in (names[0] - names[1]).items()]
    lines += [f"  only measured runs:  {text} x{count}" for text, count in (names[1] - names[0]).items()]
    return "\n".join(lines)


def module_name(step: Step, op: int) -> str:
    """Names the module of an operator."""
    module = step.ops.module_id[op]
    return str(step.modules.name[module]) if module >= 0 else "-"


def describe_alive(step: Step, op: int) -> list[str]:
    """Describes each storage alive at an operator."""
    storages = step.storages.take(alive_at(step, op))
    made = np.where(storages.created_op_id >= 0, step.ops.name[storages.created_op_id], "before")
    return [
        f"{category} {bytes_:,} {shape} {dtype} by {op_name}"
        for category, bytes_, shape, dtype, op_name in zip(
            storages.category, storages.allocated_bytes, storages.shape, storages.dtype, made, strict=True
        )
    ]


def faces(name: str, plan: Plan) -> tuple[Step, Step]:
    """Returns the predicted and the measured step of a job under a plan; the prediction is made first."""
    predicted = plan.transform(recorded(name))
    return predicted, record_step(name, plan)
