"""torch.compile captures as many graphs and breaks as often as without a recorder."""

import torch
from torch._dynamo.utils import counters
from training import make, step

model, optimizer = make()
compiled = torch.compile(model, backend="eager")
for number in range(5):
    print(number, step(compiled, optimizer).hex())
    print(dict(counters["frames"]), counters["stats"]["unique_graphs"], dict(counters["graph_break"]))
