"""A small training loop under each kind of change that a plan makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import memprof
from memprof.policies.plan.plan import Plan
from memprof.policies.registry import policy_type
from memprof.policies.runtime.job import Job

#: One of each way in which policies change a job on a processor; those of shard need ranks.
CHANGES = (
    "precision=bf16",
    "precision=fp16",
    "precision=pure-bf16",
    "accumulate=2",
    "loss=4",
    "loss=4,head",
    "checkpoint=layers",
    "checkpoint=layers.*",
    "swap=layers:disk",
    "swap=parameters:disk",
    "swap=optimizer:disk",
    "swap=optimizer,one-by-one:disk",
    "compress=layers",
    "optimizer=in-backward",
    "optimizer=fused",
    "remat=1GiB",
)
#: The same for what is put around forward.
FORWARDS = (
    "precision=bf16",
    "precision=pure-bf16",
    "checkpoint=.",
    "swap=.:disk",
    "swap=parameters:disk",
    "compress=.",
)

each_change = pytest.mark.parametrize("flag", CHANGES)
each_forward = pytest.mark.parametrize("flag", FORWARDS)


class Net(torch.nn.Module):
    """A model with an argument that has a default, and a buffer that training moves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 16)
        )
        self.head = torch.nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> Any:
        """Returns logits."""
        return self.head(self.layers(x) * scale)


class Loop:
    """A training loop, and the plan it is under."""

    def __init__(self, flag: str) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.x, self.y = torch.randn(64, 16), torch.randint(10, (64,))
        self.loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(self.x, self.y), batch_size=64)
        self.flag = flag
        self.job: Job | None = None

    def apply(self) -> Job:
        """Applies the plan; parameters of any size are swapped."""
        self.job = memprof.apply(Plan((policy_of(self.flag),)), self.model, self.optimizer)
        return self.job

    def train(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, batches: int = 1
    ) -> None:
        """Trains the model, or another."""
        model, optimizer = model or self.model, optimizer or self.optimizer
        model.train()
        for _ in range(batches):
            for x, y in self.loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()

    def plain(self) -> Net:
        """Returns a model made anew with the weights of the one that trains."""
        model = Net()
        model.load_state_dict(self.model.state_dict())
        return model


def policy_of(flag: str) -> Any:
    """Reads ``name=text``, and lets small tensors be moved, too."""
    name, _, text = flag.partition("=")
    kind = policy_type(name)
    assert kind is not None
    policy: Any = kind.from_flag(text)
    fields = {field: 1 for field in ("minimum_bytes",) if hasattr(policy, field)}
    return type(policy)(**{**vars(policy), **fields})
