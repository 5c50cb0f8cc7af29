"""A small transformer that is trained on sequences of several lengths, and recorded, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import memprof
from memprof.policies.plan.plan import Plan
from tests.planners.sizes import in_a_small_process

WORDS, WIDTH = 64, 32


class Transformer(nn.Module):
    """Embeds words, runs layers of attention over them, and scores the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = layer(hidden)
        scores: torch.Tensor = self.head(hidden)
        return scores


def record_lengths(path: Path, lengths: Sequence[int], plan: Plan | None = None, *, batch: int | None = None) -> Path:
    """Trains on one batch of each length and records all but the first two.

    Args:
        path: File of the recording.
        lengths: The lengths; the target is one shorter than the sequence.
        plan: A plan to train under.
        batch: Samples of every batch but the last, which has one less; 4 in all where left out.
    """
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    applied = memprof.apply(plan or Plan(), model, optimizer)
    try:
        with in_a_small_process(), memprof.record(path, skip=2, steps=len(lengths) - 2):
            for place, length in enumerate(lengths):
                samples = 4 if batch is None else batch - (place == len(lengths) - 1)
                words = torch.ones(samples, length, dtype=torch.long)
                targets = torch.ones(samples, length - 1, dtype=torch.long)
                optimizer.zero_grad()
                scores = model(words)[:, :-1]
                loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
                loss.backward()
                optimizer.step()
    finally:
        applied.undo()
    return path
