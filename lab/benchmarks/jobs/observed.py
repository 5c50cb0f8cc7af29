"""Trains a model with one recorder, or none; prints the wall and processor time of each step as JSON."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

GPT = Path(__file__).resolve().parents[3] / "sample_traces" / "gpt" / "train.py"
Train = Callable[[], None]
OBSERVERS = ("none", "dispatch", "memtracker", "profiler", "memray")


class Bare(TorchDispatchMode):
    """Does nothing with each operator but call it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Count(Bare):
    """Counts operators."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def tiny() -> tuple[nn.Module, torch.optim.Optimizer, Train]:
    """Many operators on next to no data: all the time is overhead."""
    layers = [part for _ in range(40) for part in (nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=False)
    inputs = torch.randn(4, 8)

    def train() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return model, optimizer, train


def gpt() -> tuple[nn.Module, torch.optim.Optimizer, Train]:
    """The sample GPT at its own size."""
    spec = importlib.util.spec_from_file_location("gpt_sample", GPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.GPT(vocabulary=30, length=128, width=128, heads=4, layers=4, dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(30, (16, 129))

    def train() -> None:
        optimizer.zero_grad()
        logits = model(ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()

    return model, optimizer, train


def observer(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Returns the context manager that observes."""
    if name == "dispatch":
        return Bare()
    if name == "memtracker":
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        return tracker
    if name == "profiler":
        return profiler()
    if name == "memray":
        return memray()
    return contextlib.nullcontext()


def profiler() -> Any:
    """Returns torch.profiler with memory, shapes and stacks."""
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True)


@contextlib.contextmanager
def memray() -> Iterator[None]:
    """Has memray write every allocation of the process, with its Python stack, to a file."""
    from memray import Tracker

    with tempfile.TemporaryDirectory() as folder, Tracker(Path(folder, "run.bin")):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["tiny", "gpt"], default="tiny")
    parser.add_argument("--observer", choices=OBSERVERS, default="none")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--export", type=Path, help="profile a step with torch.profiler, and write its Chrome trace")
    parser.add_argument("--count", action="store_true", help="count the operators of a step, too")
    args = parser.parse_args()

    torch.manual_seed(0)
    model, optimizer, train = {"tiny": tiny, "gpt": gpt}[args.model]()
    for _ in range(args.warm_up):
        train()
    if args.export:
        with profiler() as profiled:
            train()
        profiled.export_chrome_trace(str(args.export))
        return
    durations, processor = [], []
    with observer(args.observer, model, optimizer) as observing:
        for _ in range(args.steps):
            start, start_processor = time.perf_counter_ns(), time.thread_time_ns()
            train()
            durations.append((time.perf_counter_ns() - start) / 1e3)
            processor.append((time.thread_time_ns() - start_processor) / 1e3)
            if args.observer == "memtracker":
                observing.reset_mod_stats()  # it follows one iteration, and is to be told where the next begins
        end = time.perf_counter_ns()
    closing = time.perf_counter_ns() - end
    counted = Count()
    if args.count:
        with counted:
            train()
    times = {"steps_us": durations, "processor_us": processor, "closing_us": closing / 1e3}
    print(json.dumps({**times, "ops": counted.calls}))


if __name__ == "__main__":
    main()
