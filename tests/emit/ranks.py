"""Trains a GPT on two ranks, as memprof shards it and as emitted FSDP2 code does, and writes the results as JSON.

Usage: torchrun --nproc-per-node 2 -m tests.emit.ranks EMITTED PLAN RESULT, each file read or written by every rank.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from memprof.policies.plan.plan_file import read_plan
from memprof.policies.runtime.job import Job
from tests.emit.running import loop_in, lowest_peak
from tests.policies.faces import load_job

STEPS = 4


def emitted(text: str, rank: int) -> dict[str, Any]:
    """Trains as the emitted code and its loop have it; each rank takes every second batch."""
    job = load_job("gpt")
    torch.manual_seed(0)
    loader, model = job.make_loader(), job.make_model()
    losses: list[float] = []
    scope: dict[str, Any] = {"torch": torch, "model": model}
    exec(compile(text, "under_plan.py", "exec"), scope)
    scope["shard"](model)
    scope["optimizer"] = job.make_optimizer(model)
    scope["prepare"](model, scope["optimizer"])
    scope["loss_of"] = lambda model, batch: noted(job.loss_of(model, batch), losses)
    scope["loader"] = itertools.islice(itertools.islice(loader, rank, None, 2), STEPS)
    loop = loop_in(text)
    peak_bytes = lowest_peak(lambda: exec(compile(loop, "loop.py", "exec"), scope), STEPS)
    return result(model, losses, peak_bytes)


def applied(plan: Path) -> dict[str, Any]:
    """Trains under the plan, as memprof applies it."""
    job = load_job("gpt")
    torch.manual_seed(0)
    loader, model = job.make_loader(), job.make_model()
    optimizer = job.make_optimizer(model)
    losses: list[float] = []
    sharded = Job(model, [optimizer])
    read_plan(plan).apply(sharded)

    def train() -> None:
        for batch in itertools.islice(loader, STEPS):
            optimizer.zero_grad()
            loss = noted(job.loss_of(model, batch), losses)
            loss.backward()
            optimizer.step()

    found = result(model, losses, lowest_peak(train, STEPS))
    sharded.undo()
    return found


def noted(loss: torch.Tensor, losses: list[float]) -> torch.Tensor:
    losses.append(loss.item())
    return loss


def result(model: Any, losses: list[float], peak_bytes: int) -> dict[str, Any]:
    parts = sum(getattr(each, "to_local", lambda each=each: each)().nbytes for each in model.parameters())
    return {"losses": losses, "parameter_bytes": parts, "peak_bytes": peak_bytes}


def main() -> None:
    emitted_path, plan, to = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gc.freeze()  # torch's own objects, all of which each recording would search for models
    rank = dist.get_rank()
    tempfile.tempdir = tempfile.mkdtemp()  # a folder of this rank's own for its recordings
    found = {"applied": applied(plan)}
    gc.collect()  # or what is left of that run is in the next one's peak until the collector happens to run
    found["emitted"] = emitted(emitted_path.read_text(), rank)
    Path(f"{to}.{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
