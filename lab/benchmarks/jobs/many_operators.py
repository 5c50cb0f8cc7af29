"""Times a step of a thousand small operators plain and under an ample budget of remat; prints microseconds as JSON."""

from __future__ import annotations

import json
import time

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memprof.policies.remat.policy import Remat
from memprof.policies.runtime.job import Job

LENGTH, REPEATS = 500, 15


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        for _ in range(LENGTH):
            x = torch.sin(x) * self.weight
        return x


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    torch.set_num_threads(1)
    model, x = Chain(), torch.randn(4, 8)

    def step_us() -> float:
        best = float("inf")
        for _ in range(REPEATS):
            start = time.process_time()
            model(x).sum().backward()
            best = min(best, time.process_time() - start)
        return best * 1e6

    plain_us = step_us()
    with Counting() as counting:
        model(x).sum().backward()
    with Counting():
        mode_us = step_us()
    job = Job(model)
    Remat(budget="8GiB").apply(job)
    remat_us = step_us()
    job.undo()
    print(json.dumps({"operators": counting.count, "plain_us": plain_us, "mode_us": mode_us, "remat_us": remat_us}))


if __name__ == "__main__":
    main()
