"""Expert parallelism: ``experts.py count|mask|histogram|gather [load]``, by how tokens are counted and exchanged.

With a load, real ranks send the experts of the first rank so many times their equal share of the words.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from small_gpt import GPT, WIDTH, begin, train
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional

KIND = sys.argv[1]
LOAD = float(sys.argv[2]) if len(sys.argv) > 2 else None
EXPERTS = 8
device = begin()
ranks = dist.get_world_size()
own = EXPERTS // ranks


def planned(count: int, load: float, device: torch.device) -> torch.Tensor:
    """Returns experts, [count], of which the first rank has a share, and the others equal parts of the rest."""
    first = round(count * load / ranks)
    places = torch.arange(count, device=device)
    return torch.where(places < first, places % own, own + places % (EXPERTS - own))


class Experts(nn.Module):
    """Sends each word to one expert, of which every rank has its share."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(own)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what the experts return, weighted; x is [batch, length, width]."""
        words = x.flatten(0, 1)
        weights, chosen = self.gate(words).softmax(-1).max(-1)
        if LOAD is not None:
            # True for all words, whatever the router chose; the routing stays unknown to a dry run.
            chosen = torch.where(chosen >= 0, planned(len(chosen), LOAD, chosen.device), chosen)
        order = chosen.argsort()
        if KIND == "mask":
            counts = functional.one_hot(chosen, EXPERTS).sum(0)
        elif KIND == "histogram":
            counts = torch.histc(chosen.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).long()
        else:
            counts = torch.bincount(chosen, minlength=EXPERTS)
        if KIND == "gather":
            every = counts.new_empty(ranks * EXPERTS)
            dist.all_gather_into_tensor(every, counts)
            received = every.view(ranks, EXPERTS)[:, dist.get_rank() * own : (dist.get_rank() + 1) * own]
        else:
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts)
            received = received.view(ranks, own)
        to_others, from_others = counts.view(ranks, own).sum(1).tolist(), received.sum(1).tolist()
        words = all_to_all_single_autograd(words[order], from_others, to_others, dist.group.WORLD)
        parts = words.split(received.sum(0).tolist())
        words = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        words = all_to_all_single_autograd(words, to_others, from_others, dist.group.WORLD)
        return (words[order.argsort()] * weights[:, None]).view(x.shape)


model = GPT().to(device)
for layer in model.layers:
    layer.up, layer.down = nn.Identity(), Experts().to(device)
train(model, model.parameters(), device)
