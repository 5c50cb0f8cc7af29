"""Double backward: a critic whose loss holds the norm of its own gradient (create_graph)."""

import torch
from torch import nn

torch.manual_seed(6)
critic = nn.Sequential(
    nn.Conv2d(1, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.SiLU(), nn.Flatten(), nn.Linear(16 * 49, 1)
)
optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
for step in range(10):
    real = torch.rand(16, 1, 28, 28)
    fake = torch.randn(16, 1, 28, 28)
    mix = torch.rand(16, 1, 1, 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_(True)
    scores = critic(between)
    (gradient,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
    penalty = (gradient.flatten(1).norm(2, dim=1) - 1).pow(2).mean()
    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()), repr(penalty.item()))
