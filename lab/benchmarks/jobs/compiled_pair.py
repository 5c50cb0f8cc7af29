"""Times steps of one model under a plan and under torch's own budget, in one process: python compiled_pair.py NAME.

Prints one JSON object: for "plan" and "share" the median step of each round, in microseconds, and as "ratio" the median
of the ratios of neighbouring steps. The two take turns at every step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable

import compiled
import torch
import torch._functorch.config as settings

#: Batches that take turns: all sizes of a job whose sizes vary.
_BATCHES = 3
_WARM_UP = 2 * _BATCHES


def training(name: str, **under: object) -> Callable[[], float]:
    """Compiles a model of its own, and returns what takes a step and returns its time in microseconds."""
    torch.manual_seed(0)
    model, batch = compiled.model_named(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    called = compiled.compiled_under(model, optimizer, **under)  # type: ignore[arg-type]
    batches = itertools.cycle([batch(number) for number in range(_BATCHES)])

    def step() -> float:
        given = next(batches)
        start = time.perf_counter()
        loss = compiled.loss_of(name, called, *given)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        return (time.perf_counter() - start) * 1e6

    for _ in range(_WARM_UP):
        step()
    return step


def main() -> None:
    """Compiles both, then times them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--plan", required=True)
    parser.add_argument("--share", type=float, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    before = settings.activation_memory_budget
    steps = {"share": training(args.name, share=args.share)}
    settings.activation_memory_budget = before
    steps["plan"] = training(args.name, plan=args.plan)
    found: dict[str, list[float]] = {"share": [], "plan": [], "ratio": []}
    for _ in range(args.rounds):
        times: dict[str, list[float]] = {"share": [], "plan": []}
        for number in range(args.steps):
            for one in ("plan", "share") if number % 2 else ("share", "plan"):
                times[one].append(steps[one]())
        for one, taken in times.items():
            found[one].append(statistics.median(taken))
        found["ratio"].append(statistics.median(map(float.__truediv__, times["plan"], times["share"])))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
