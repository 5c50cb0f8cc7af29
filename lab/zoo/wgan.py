"""Wasserstein GAN: five critic updates with clipped weights for each one of the generator."""

import torch
from torch import nn

torch.manual_seed(5)
critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
generator = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=5e-4)
generator_optimizer = torch.optim.RMSprop(generator.parameters(), lr=5e-4)


def real_points(count):
    angles = torch.rand(count) * 2 * torch.pi
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(count, 2)


for round_ in range(10):
    for _ in range(5):
        critic_optimizer.zero_grad()
        with torch.no_grad():
            fake = generator(torch.randn(128, 4))
        distance = critic(real_points(128)).mean() - critic(fake).mean()
        (-distance).backward()
        critic_optimizer.step()
        for parameter in critic.parameters():
            parameter.data.clamp_(-0.01, 0.01)
    generator_optimizer.zero_grad()
    loss = -critic(generator(torch.randn(128, 4))).mean()
    loss.backward()
    generator_optimizer.step()
    print(round_, repr(distance.item()), repr(loss.item()))
