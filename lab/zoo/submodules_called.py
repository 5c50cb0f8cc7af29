"""An autoencoder whose forward is never called: the script calls encoder and decoder itself."""

import torch
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(100, 64), nn.ELU(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ELU(), nn.Linear(64, 100))
        self.register_buffer("mean", torch.zeros(100))

    def forward(self, x):
        raise NotImplementedError("call encoder and decoder")


torch.manual_seed(18)
model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
basis = torch.randn(5, 100)
for step in range(10):
    x = torch.randn(64, 5) @ basis
    model.mean.lerp_(x.mean(0), 0.1)
    code = model.encoder(x - model.mean)
    rebuilt = model.decoder(code) + model.mean
    loss = nn.functional.mse_loss(rebuilt, x) + 1e-3 * code.abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
