"""The loop that the jobs beside this file run as scripts; in a test's own process faces.py has another."""

from __future__ import annotations

import argparse
from itertools import chain, islice, repeat

import torch


def train(description, make_loader, make_model, make_optimizer, loss_of):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    loader = make_loader()
    model = make_model()
    optimizer = make_optimizer(model)
    epochs = chain.from_iterable(repeat(loader))
    for step, batch in enumerate(islice(epochs, args.steps)):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item()!r}", flush=True)
