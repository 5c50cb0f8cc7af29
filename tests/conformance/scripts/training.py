"""A small training, for the scripts in this folder."""

import torch
from torch import nn

STEPS = 5  # of which memprof skips the first and records the second and third


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, width=16, depth=2):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        return self.head(self.blocks(x))


def make(seed=0):
    torch.manual_seed(seed)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, batch=None):
    batch = torch.randn(8, 16) if batch is None else batch
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model=None, optimizer=None, before=None):
    if model is None:
        model, optimizer = make()
    for number in range(STEPS):
        if before:
            before(number)
        print(number, step(model, optimizer).hex(), flush=True)
    return model, optimizer
