"""Trains small models on two ranks, under each stage of shard and plain, and prints the results as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from memprof.errors import PolicyError
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.runtime.job import Job
from memprof.policies.shard.policy import Shard
from memprof.policies.swap.policy import Swap


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 14)
        self.outer = nn.Linear(14, 7)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(nn.Module):
    """Layers that are units, a parameter of 3 rows, one that is frozen, and one that is used on request only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(7, 3)
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.spare = nn.Parameter(torch.ones(7))
        self.uses_spare = False

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        x = x * self.frozen
        return self.head(x + self.spare if self.uses_spare else x)


def train(
    policy: Shard | None, *, optimizer: str = "AdamW", clip: float = 0.0, keeps: bool = False, spare: str = ""
) -> dict[str, Any]:
    """Trains five steps on data that is the same on all ranks, or with a batch that is divided.

    Args:
        policy: The policy, or None for a plain run.
        optimizer: Class of torch.optim.
        clip: Largest norm of the gradients, 0 for any; the script keeps its own list of parameters for it.
        keeps: Zero gradients in place instead of dropping them.
        spare: Which ranks use the spare parameter: none, all, or first.
    """
    torch.manual_seed(3)
    model = Net()
    model.uses_spare = spare == "all" or (spare == "first" and dist.get_rank() == 0)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)
    own = list(model.parameters())
    job = Job(model, [made])
    if policy is not None:
        Plan((policy,)).apply(job)
    data = TensorDataset(torch.randn(40, 7, generator=torch.Generator().manual_seed(5)), torch.arange(40) % 3)
    losses, norms = [], []
    for inputs, targets in DataLoader(data, batch_size=8):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        made.zero_grad(set_to_none=not keeps)
        loss.backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(own, clip)
            norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        made.step()
        losses.append(loss.item())
    state = {name: value.tolist() for name, value in model.state_dict().items()}
    rows = sum(value.shape[0] for each in made.state.values() for key, value in each.items() if key == "exp_avg")
    whole = sum(value.numel() for each in made.state.values() for key, value in each.items() if key == "exp_avg")
    local = sum(
        (value.to_local() if hasattr(value, "to_local") else value).numel()
        for each in made.state.values()
        for key, value in each.items()
        if key == "exp_avg"
    )
    notes = list(job.notes)
    job.undo()
    kinds = sorted({type(each).__name__ for each in (*model.modules(), *model.parameters())})
    with torch.no_grad():
        after = [each.tolist() for each in model(data.tensors[0][:2])]
    return {
        "losses": losses,
        "norms": norms,
        "state": state,
        "elements": [rows, whole, local],
        "notes": notes,
        "kinds": kinds,
        "after": after,
        "has_spare": model.spare.grad is not None,
    }


def refusals() -> list[str]:
    """Returns the sentence about each model and optimizer that cannot be divided."""
    tied, scalar, sparse, mixed = Net(), Net(), nn.Sequential(nn.Embedding(4, 2, sparse=True)), Net()
    tied.layers[0].inner.bias = tied.layers[1].inner.bias
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    mixed.layers[1].outer.to(torch.float64)
    started = torch.optim.SGD((model := Net()).parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 7)).sum().backward()
    started.step()
    cases = [
        (Shard(3, 2), tied, None),
        (Shard(2, 2), scalar, None),
        (Shard(0, 2), sparse, None),
        (Shard(3, 2), mixed, None),
        (Shard(3, 2), model, started),
        (Shard(1, 2), Net(), torch.optim.Adafactor),
        (Shard(3, 2), Net(), torch.optim.LBFGS),
        (Shard(3, 4), Net(), None),
        (Shard(3, 2, units=("layer.*",)), Net(), None),
    ]
    found = []
    for policy, model, kind in cases:
        optimizer = (
            kind if isinstance(kind, torch.optim.Optimizer) else (kind or torch.optim.SGD)(model.parameters(), 0.1)
        )
        before = {name: id(each) for name, each in model.named_parameters()}
        try:
            Plan((policy,)).apply(Job(model, [optimizer]))
        except PolicyError as error:
            found.append(str(error))
        assert before == {name: id(each) for name, each in model.named_parameters()}
    return found


def conflicts() -> list[str]:
    """Returns the sentence about each policy that cannot follow shard."""
    cases = [
        (Shard(0, 2), OptimizerPolicy(in_backward=True)),
        (Shard(1, 2), OptimizerPolicy(in_backward=True)),
        (Shard(3, 2), OptimizerPolicy(state="8bit")),
        (Shard(3, 2), Precision.from_flag("pure-bf16")),
        (Shard(2, 2), Swap(what="optimizer", to="disk")),
    ]
    found = []
    for policies in cases:
        model = Net()
        state = {name: value.tolist() for name, value in model.state_dict().items()}
        try:
            Plan(policies).apply(Job(model, [torch.optim.AdamW(model.parameters())]))
        except PolicyError as error:
            found.append(str(error))
        # Rank 0's numbers are everybody's now; nothing else has changed.
        assert {name: value.shape for name, value in model.state_dict().items()} == {
            name: torch.tensor(value).shape for name, value in state.items()
        }
        assert all(type(each) is nn.Parameter for each in model.parameters())
    return found


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results: dict[str, Any] = {"rank": dist.get_rank(), "plain": train(None), "spare": train(None, spare="all")}
    results["clipped"] = train(None, clip=0.1)
    results["sgd"] = train(None, optimizer="SGD", keeps=True)
    for stage in range(4):
        results[f"split {stage}"] = train(Shard(stage, 2, batch="split"))
        results[f"clipped {stage}"] = train(Shard(stage, 2, batch="split"), clip=0.1)
        results[f"sgd {stage}"] = train(Shard(stage, 2, batch="split"), optimizer="SGD", keeps=True)
        results[f"keep {stage}"] = train(Shard(stage, 2))
        results[f"spare {stage}"] = train(Shard(stage, 2, batch="split"), spare="all")
    results["first"] = train(Shard(0, 2, batch="split"), spare="first")
    results["refusals"] = refusals()
    results["conflicts"] = conflicts()
    Path(f"{sys.argv[1]}.{os.environ['RANK']}").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
