"""fairscale's language model for pipelines, whose bytes per stage it publishes (benchmarks/pipe.py): four stages.

WikiText-2 in lower case has 28,782 words and one for those unknown; of 256 words in 8 sequences the last are targets.
"""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional

WORDS, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 28_783, 2048, 32, 10, 31, 8


class Embedding(nn.Embedding):
    """Scaled embeddings."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns [length, batch, width]; ids are [length, batch]."""
        return super().forward(ids) * math.sqrt(WIDTH)


class Places(nn.Module):
    """Adds the encoding of places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.zeros(5000, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x of [length, batch, width], with its places."""
        return x + self.places[: len(x)]


class Block(nn.Module):
    """A layer with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x after attention and a hidden layer, each added and normalized."""
        mask = torch.triu(torch.full((len(x), len(x)), -math.inf, device=x.device), 1)
        x = self.norm_1(x + self.attention(x, x, x, attn_mask=mask)[0])
        return self.norm_2(x + self.down(functional.relu(self.up(x))))


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Returns the cross-entropy."""
    return functional.cross_entropy(logits.view(-1, WORDS), target.view(-1))


rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
device = torch.device("cuda", rank)
with torch.device("meta"):
    whole = [Embedding(WORDS, WIDTH), Places(), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, WORDS)]
first = (0, 4, 7, 10, 13)
part = nn.Sequential(*whole[first[rank] : first[rank + 1]]).to_empty(device=device)
schedule = ScheduleGPipe(PipelineStage(part, rank, 4, device), 1, loss_fn=loss_of)
optimizer = torch.optim.Adam(part.parameters(), lr=1e-3, foreach=False)
for _ in range(4):
    words = torch.randint(WORDS, (LENGTH + 1, BATCH), device=device)
    optimizer.zero_grad(set_to_none=False)
    given = [words[:-1]] if rank == 0 else []
    schedule.step(*given, **({"target": words[1:]} if rank == 3 else {}))
    torch.nn.utils.clip_grad_value_(part.parameters(), 0.05, foreach=False)
    optimizer.step()
dist.destroy_process_group()
