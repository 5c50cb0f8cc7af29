"""Trains a language model of the sizes of GPT-3 on random words: too large for most machines, for dry runs.

Source of the sizes: Brown et al., "Language Models are Few-Shot Learners" (2020), table 2.1; the 13B model's width of
5,140, which its 40 heads do not divide, is 5,120 here. The 175B model's heads have 128 numbers each.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from models import Block, Decoder
from torch.nn import functional as F

VOCABULARY, LENGTH = 50257, 2048


@dataclass(frozen=True)
class Size:
    """How large a model is."""

    layers: int
    width: int
    heads: int


SIZES = {
    "125m": Size(12, 768, 12),
    "1.3b": Size(24, 2048, 24),
    "2.7b": Size(32, 2560, 32),
    "6.7b": Size(32, 4096, 32),
    "13b": Size(40, 5120, 40),
    "175b": Size(96, 12288, 96),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="13b")
    parser.add_argument("--layers", type=int, help="fewer layers than the size has")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    size = SIZES[args.size]
    if args.layers:
        size = Size(args.layers, size.width, size.heads)
    with torch.device(args.device):
        blocks = [Block(size.width, size.heads) for _ in range(size.layers)]
        model = Decoder(VOCABULARY, size.width, blocks, length=LENGTH, has_bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(args.steps):
        ids = torch.randint(VOCABULARY, (args.batch_size, LENGTH + 1), device=args.device)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
