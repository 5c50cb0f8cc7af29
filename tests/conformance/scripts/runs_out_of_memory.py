"""Trains until memory runs out, at the place that is named: torch's allocator really gets none from the system."""

from __future__ import annotations

import gc
import resource
import sys
import weakref

import torch

WIDTH = 3072  # a weight of 36 MiB: malloc maps and unmaps blocks of that size
SLACK = 24 << 20


def leave(free: int) -> None:
    """Limits the process to this many more bytes."""
    with open("/proc/self/statm") as statm:
        taken = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + free, resource.RLIM_INFINITY))


class Net(torch.nn.Module):
    """Two layers, of which the second fails where it is asked to."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        if place == "build":
            leave(SLACK)
        self.second = torch.nn.Linear(WIDTH, WIDTH)
        self.place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.place == "first":
            leave(SLACK)
            x = torch.zeros(WIDTH, WIDTH)
        x = torch.relu(self.first(x))
        if self.place == "forward" or (self.place == "retried" and len(x) > 2):
            leave(SLACK)
            x = x.repeat(WIDTH, 1)
        return self.second(x)


def train(place: str) -> None:
    """Trains six steps, or as far as memory lasts."""
    steps = 6
    torch.manual_seed(0)
    model = Net(place)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for step in range(steps):
        optimizer.zero_grad()
        if place == "retried":
            halve_until_it_fits(model)
        else:
            loss = model(torch.randn(2, WIDTH)).square().mean()
            if place in ("backward", "handled", "chained"):
                leave(SLACK)
            loss.backward()
        if place == "optimizer" or (place == "late" and step == steps - 1):
            leave(SLACK)
        if place == "late" and step == steps - 1:
            torch.ones(WIDTH, WIDTH)
        optimizer.step()
        print(step, flush=True)


def halve_until_it_fits(model: torch.nn.Module) -> None:
    """Halves the batch until there is memory for it, and shows that nothing of a failed try is left."""
    batch, given_back = 4, []
    while True:
        x = torch.randn(batch, WIDTH)
        given_back.append(weakref.ref(x))
        try:
            model(x).square().mean().backward()
            break
        except RuntimeError:
            batch //= 2
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            del x
            gc.collect()
    print("fits at", batch, [tensor() is None for tensor in given_back])


def main() -> None:
    place = sys.argv[1]
    torch.set_num_threads(1)
    if place == "handled":
        try:
            train(place)
        except RuntimeError as error:
            print("giving up:", error, file=sys.stderr)
            sys.exit(3)
    elif place == "chained":
        try:
            train(place)
        except RuntimeError as error:
            raise ValueError("the training failed") from error
    else:
        train(place)


main()
