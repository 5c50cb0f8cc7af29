"""transformers#20920: after training, the best checkpoint's state is read whole while the model is still there."""

import tempfile
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(768, 768) for _ in range(6)))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "best.pt")
    for step in range(24):
        model(torch.randn(8, 768)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 11:
            torch.save(model.state_dict(), path)
    state = torch.load(path)
    extra = {name: each.float().clone() for name, each in state.items()}
    model.load_state_dict(extra)
