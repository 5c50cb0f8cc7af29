"""Trains a GPT with a recorder, or none; prints the microseconds of every step.

--observer names what records after the warm-up: nothing, torch's memory history, torch.profiler, or MemTracker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time

import gpt
import torch
import training

SIZES = {**gpt.SIZES, "narrow": {"layers": 12, "width": 64, "heads": 2, "length": 64, "vocabulary": 256, "batch": 4}}


def observer(name, device, model, optimizer):
    if name == "history":
        return history()
    if name == "memtracker":
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        return tracker
    if name == "profiler":
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
        return profile(activities=activities, profile_memory=True, record_shapes=True, with_stack=True)
    return contextlib.nullcontext()


@contextlib.contextmanager
def history():
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)
    yield
    torch.cuda.memory._record_memory_history(enabled=None)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--observer", choices=["none", "history", "profiler", "memtracker"], default="none")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--gate")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device(args.device)
    model = gpt.GPT(**SIZES[args.size]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = (part.to(device) for part in training.make_words(SIZES[args.size]))
    found = []
    held = training.hold(args.gate)

    def step():
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = training.loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        loss.item()  # waits for the device
        found.append({"us": (time.perf_counter() - start) * 1e6})

    for _ in range(args.warm_up):
        step()
    with observer(args.observer, args.device, model, optimizer) as observing:
        for _ in range(args.steps):
            step()
            if args.observer == "memtracker":
                observing.reset_mod_stats()  # it follows one iteration, and is to be told where the next begins
        end = time.perf_counter()
    closing_us = (time.perf_counter() - end) * 1e6
    print(json.dumps({"steps": found, "closing_us": closing_us}), flush=True)
    return held


if __name__ == "__main__":
    main()
