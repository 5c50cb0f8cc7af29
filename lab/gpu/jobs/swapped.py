"""Trains a GPT whose layers' saved tensors stay, are moved to the host in one of two ways, or are recomputed.

Prints the microseconds of each step, the tokens of one, the last loss, and the allocator's peak.
"""

from __future__ import annotations

import argparse
import functools
import json
import time

import gpt
import torch
import training
from torch.autograd.graph import save_on_cpu

from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap


def apply(args, model, optimizer):
    if args.how == "save_on_cpu":
        for layer in model.layers:
            layer.forward = functools.partial(saved_on_cpu, layer.forward, args.device == "cuda")
    elif args.how == "recompute":
        Plan((Checkpoint(modules=("layers.*",)),)).apply(Job(model, [optimizer]))
    elif args.how == "swap":
        to = "host" if args.device == "cuda" else "disk"
        Plan((Swap(modules=("layers.*",), to=to, prefetch=args.prefetch),)).apply(Job(model, [optimizer]))


def saved_on_cpu(forward, pin, x):
    with save_on_cpu(pin_memory=pin):
        return forward(x)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--how", choices=["plain", "save_on_cpu", "recompute", "swap"], required=True)
    parser.add_argument("--prefetch", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=sorted(gpt.SIZES), default="tiny")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--gate")
    args = parser.parse_args()
    # Attention's backward would add up in another order each time, and cuDNN's does so whatever is asked for.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(0)
    size = {**gpt.SIZES[args.size], "batch": args.batch}
    model = gpt.GPT(**size).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs, targets = (part.to(args.device) for part in training.make_words(size))
    held = training.hold(args.gate)
    apply(args, model, optimizer)
    steps = []
    for _ in range(args.steps):
        if args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = training.loss_of(model, inputs, targets)
        loss.backward()
        optimizer.step()
        value = loss.item()
        peak = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
        steps.append({"us": (time.perf_counter() - start) * 1e6, "loss": value, "allocated_bytes": peak})
    print(json.dumps({"steps": steps, "tokens": inputs.numel()}), flush=True)
    return held


if __name__ == "__main__":
    main()
