"""One model under a fused, a foreach or a plain-loop optimizer with weight decay, maximize off, parameter groups."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=["fused", "foreach", "loop"], default="loop")
args = parser.parse_args()
flags = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}[args.kind]

torch.manual_seed(37)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3, **flags
)
for step in range(10):
    x = torch.randn(4, 64)
    loss = (model(x) - x.mean(1, keepdim=True)).abs().sum()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
