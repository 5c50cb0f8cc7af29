"""Swap where forward differentiates: what is copied back is saved again, with a record of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import memprof
from memprof.policies.runtime.job import Job
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace


class Residual(nn.Module):
    """Returns its input's image, and the sum of a power series in its Jacobian, as residual flows do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2))

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = batch.requires_grad_()
        image, total = self.layers(batch), torch.zeros(())
        vector = torch.ones_like(batch)
        for _ in range(4):
            (vector,) = torch.autograd.grad(image, batch, vector, create_graph=True)
            total = total + vector.sum()
        return batch + image, total


def _recorded(path: Path, policy: Swap | None) -> Step:
    torch.manual_seed(0)
    model = Residual()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = Job(nn.ModuleDict({"block": model}), [optimizer])
    if policy is not None:
        policy.apply(job)
    with memprof.record(path, skip=1, steps=1):
        for _ in range(3):
            image, total = job.model["block"](torch.randn(200, 2))
            (image.square().mean() + total).backward()
            optimizer.step()
            optimizer.zero_grad()
    job.undo()
    return Trace.open(path).fullest_step()


def test_what_is_copied_back_in_forward_comes_back_with_its_neighbours(tmp_path: Path) -> None:
    """To the byte: its second record is needed first, and brings back what was packed by the node before it."""
    policy = Swap(modules=("block",), to="disk")
    predicted = policy.transform(_recorded(tmp_path / "plain.memprof", None))
    measured = _recorded(tmp_path / "swapped.memprof", policy)
    assert int(live_bytes(predicted).during.max()) == int(live_bytes(measured).during.max())
