"""Trains until a file is there, then as many steps again, which nothing attaches to: steady.py FILE."""

import sys
import time
from pathlib import Path

import torch
from paced import ready

stop = Path(sys.argv[1])


def train(goes_on):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    while goes_on(len(losses)):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == 3 and not stop.exists():
            ready()
    return losses, torch.get_rng_state()


torch.set_num_threads(1)
attached = train(lambda number: time.sleep(0.01) or not stop.exists())
alone = train(lambda number: number < len(attached[0]))
print(len(attached[0]), "steps, equal:", attached[0] == alone[0] and torch.equal(attached[1], alone[1]))
sys.exit(7)
