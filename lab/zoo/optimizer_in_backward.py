"""One optimizer to each parameter, stepped inside backward as soon as the gradient is there."""

import torch
from torch import nn

torch.manual_seed(26)
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 5))
optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-3) for parameter in model.parameters()}


def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
for step in range(10):
    x, y = torch.randn(40, 32), torch.randint(5, (40,))
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    print(step, repr(loss.item()))
