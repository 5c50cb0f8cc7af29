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
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as hooks

import memprof

Train = Callable[[], None]


class _Layer(nn.Module):
    """One layer of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class _GPT(nn.Module):
    """A GPT of 4 layers of width 256: 5.7 million parameters."""

    def __init__(self, vocabulary: int = 5000, length: int = 128, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(_Layer(width, 8) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class _Residual(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(y)) + self.short(x))


class _LSTM(nn.Module):
    """A language model of two layers of 512."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.lstm, self.head = nn.Embedding(5000, 256), nn.LSTM(256, 512, 2), nn.Linear(512, 5000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.tokens(ids))[0])


def gpt() -> tuple[nn.Module, Train]:
    """A step of 8 sequences of 128 tokens."""
    model = _GPT()
    ids = torch.randint(5000, (8, 129))
    return model, _trainer(model, lambda: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


def small() -> tuple[nn.Module, Train]:
    """A step of 8 sequences of 32 tokens through a GPT of width 64: as many module calls, in little time."""
    model = _GPT(vocabulary=500, length=32, width=64)
    ids = torch.randint(500, (8, 33))
    return model, _trainer(model, lambda: F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


def resnet() -> tuple[nn.Module, Train]:
    """A step of 32 images of 32 x 32 through a ResNet-18 of half the width."""
    blocks = [_Residual(32 << max(i - 1, 0), 32 << i, 1 if i == 0 else 2) for i in range(4)]
    pairs = [part for i, block in enumerate(blocks) for part in (block, _Residual(32 << i, 32 << i, 1))]
    model = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), *pairs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100))
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(100, (32,))
    return model, _trainer(model, lambda: F.cross_entropy(model(images), labels))


def lstm() -> tuple[nn.Module, Train]:
    """A step of 16 sequences of 64 tokens."""
    model = _LSTM()
    ids = torch.randint(5000, (65, 16))
    return model, _trainer(model, lambda: F.cross_entropy(model(ids[:-1]).flatten(0, 1), ids[1:].flatten()))


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
        observation._budget._start_ns += passed
        observation._kept._began += passed / 1e9
        observation._origins._began_ns += passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["gpt", "small", "resnet", "lstm"], required=True)
    parser.add_argument("--blocks", type=int, help="pairs of blocks of --steps steps")
    parser.add_argument("--output", type=Path, help="the recording of a job that follows itself")
    parser.add_argument("--observer", choices=["none", "memtracker"], default="none")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    model, train = {"gpt": gpt, "small": small, "resnet": resnet, "lstm": lstm}[args.model]()
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
