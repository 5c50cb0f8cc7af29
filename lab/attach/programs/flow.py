"""Training other than in a loop on the main thread: flow.py threads|joined|asyncio|generator|pool|fork."""

import asyncio
import multiprocessing
import os
import sys
import threading

import torch
from paced import digest, step
from torch import nn


def training(seed, steps=10, pace=step):
    """Trains a model of its own with a generator of its own; yields each loss."""
    draw = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1, generator=draw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        x, y = torch.randn(32, 16, generator=draw), torch.randint(4, (32,), generator=draw)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        pace()
        yield loss.item()


def threads():
    """Two threads train; the main thread trains too."""
    found = {}
    others = [threading.Thread(target=lambda seed=seed: found.update({seed: list(training(seed))})) for seed in (1, 2)]
    for each in others:
        each.start()
    found[0] = list(training(0))
    for each in others:
        each.join()
    print(sorted(found.items()))


def joined():
    """One thread trains while the main thread waits for its end."""
    found = []
    other = threading.Thread(target=lambda: found.extend(training(1)))
    other.start()
    other.join()
    print(found)


def in_asyncio():
    """Two coroutines take turns."""

    async def train(seed):
        found = []
        for loss in training(seed):
            found.append(loss)
            await asyncio.sleep(0.001)
        return found

    async def both():
        return await asyncio.gather(train(1), train(2))

    print(asyncio.run(both()))


def generator():
    """Two generators take turns."""
    print(list(zip(training(1), training(2), strict=True)))


def pool():
    """A pool of two processes prepares batches."""
    with multiprocessing.get_context("fork").Pool(2) as workers:
        for number, loss in enumerate(training(1)):
            print(repr(loss), sum(workers.map(abs, range(number))))


def fork():
    """A child is forked in each step, trains one step itself and tells its loss by a pipe."""
    for number, loss in enumerate(training(1)):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.write(writing, repr(next(training(number, 1, lambda: None))).encode())
            os._exit(0)
        os.close(writing)
        print(repr(loss), os.read(reading, 100), os.waitpid(child, 0)[1])
        os.close(reading)


torch.set_num_threads(1)
torch.manual_seed(1)
if sys.argv[1] == "asyncio":
    in_asyncio()
else:
    globals()[sys.argv[1]]()
print(digest())
