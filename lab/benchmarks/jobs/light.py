"""Trains a model of typical size with one recorder, or none; prints wall and processor time of each step as JSON.

With --blocks, the job follows itself with --light, and every other block of steps is plain: the processor time of each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from models import Block, Decoder, Residual, ResNet
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as hooks

import memprof

Train = Callable[[], None]


class _LSTM(nn.Module):
    """A language model of two layers of 512."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm, self.head = nn.Embedding(5000, 256), nn.LSTM(256, 512, 2), nn.Linear(512, 5000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(ids))[0])


def _gpt(vocabulary: int, length: int, width: int) -> tuple[nn.Module, Train]:
    layers = [Block(width, 8) for _ in range(4)]
    model = Decoder(vocabulary, width, layers, length=length, has_norm=False)
    ids = torch.randint(vocabulary, (8, length + 1))
    return model, _trainer(model, lambda: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


def resnet() -> tuple[nn.Module, Train]:
    """A step of 32 images of 32 x 32 through a ResNet-18 of half the width."""
    blocks = [part for i in range(4) for part in (Residual(32 << i, 2 if i else 1), Residual(32 << i))]
    model = ResNet(nn.Conv2d(3, 32, 3, 1, 1), blocks, 256, 100)
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(100, (32,))
    return model, _trainer(model, lambda: F.cross_entropy(model(images), labels))


def lstm() -> tuple[nn.Module, Train]:
    """A step of 16 sequences of 64 tokens."""
    model = _LSTM()
    ids = torch.randint(5000, (65, 16))
    return model, _trainer(model, lambda: F.cross_entropy(model(ids[:-1]).flatten(0, 1), ids[1:].flatten()))


#: GPTs of 4 layers, of 5.7 million parameters and as many module calls in little time, and the others.
MODELS: dict[str, Callable[[], tuple[nn.Module, Train]]] = {
    "gpt": lambda: _gpt(5000, 128, 256),
    "small": lambda: _gpt(500, 32, 64),
    "resnet": resnet,
    "lstm": lstm,
}


def _trainer(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Train:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return train


def observer(name: str, model: nn.Module) -> Any:
    """Returns the context manager that observes."""
    if name == "memtracker":
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        tracker.track_external(model)
        return tracker
    return contextlib.nullcontext()


def in_turn(model: nn.Module, train: Train, blocks: int, steps: int, output: Path) -> dict[str, list[float]]:
    """Returns the processor time of each block, in microseconds, with --light and without.

    Two processes differ by several per cent in where their memory lies, so that both are measured in one.
    """
    found: dict[str, list[float]] = {"light": [], "plain": []}

    def run(name: str) -> None:
        start = time.thread_time_ns()
        for _ in range(steps):
            train()
        found[name].append((time.thread_time_ns() - start) / 1e3)
        for parameter in model.parameters():
            parameter.grad = None  # counted as allocated, and else freed uncounted, or the other way round

    with memprof.record(output, light=True) as recording:
        train()
        for number in range(blocks):
            for name in ("plain", "light") if number % 2 else ("light", "plain"):
                with plain(recording._recorder) if name == "plain" else contextlib.nullcontext():
                    run(name)
    return found


@contextlib.contextmanager
def plain(recorder: Any) -> Iterator[None]:
    """Takes everything that a light recorder has installed out of the job; its own clocks stand still."""
    tables = (hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks)
    kept = [dict(table) for table in tables]
    start = time.thread_time_ns()
    exact = recorder._observation._exact
    exact.stop()
    recorder._calls.remove()
    recorder._table._report.value = False
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, entries in zip(tables, kept, strict=True):
            table.update(entries)
        recorder._table._report.value = True
        recorder._calls.install()
        observation, passed = recorder._observation, time.thread_time_ns() - start
        exact.start(observation.step)
        observation._budget._start_ns += passed
        observation._kept._began += passed / 1e9
        observation._origins._began_ns += passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--blocks", type=int, help="pairs of blocks of --steps steps")
    parser.add_argument("--output", type=Path, help="the recording of a job that follows itself")
    parser.add_argument("--observer", choices=["none", "memtracker"], default="none")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, train = MODELS[args.model]()
    if args.blocks:
        print(json.dumps(in_turn(model, train, args.blocks, args.steps, args.output)))
        return
    walls, processor = [], []
    with observer(args.observer, model) as observing:
        for _ in range(args.steps):
            start, start_processor = time.perf_counter_ns(), time.thread_time_ns()
            train()
            walls.append((time.perf_counter_ns() - start) / 1e3)
            processor.append((time.thread_time_ns() - start_processor) / 1e3)
            if args.observer == "memtracker":
                observing.reset_mod_stats()  # it follows one iteration, and is to be told where the next begins
    print(json.dumps({"steps_us": walls, "processor_us": processor}))


if __name__ == "__main__":
    main()
