"""A tiny model under torch.compile."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="inductor")
args = parser.parse_args()

torch.manual_seed(14)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
compiled = torch.compile(model, backend=args.backend)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    x, y = torch.randn(64, 16), torch.randint(4, (64,))
    loss = nn.functional.cross_entropy(compiled(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
counters = torch._dynamo.utils.counters
print("compiled graphs:", counters["stats"]["unique_graphs"], "graph breaks:", sum(counters["graph_break"].values()))
