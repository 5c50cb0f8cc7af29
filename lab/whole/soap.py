"""SOAP and Shampoo: the preconditioners' eigenvectors are renewed every ten steps, with all factors alive."""

import torch
from torch import nn


class Soap(torch.optim.Optimizer):
    """Keeps both Kronecker factors of each matrix; renews their eigenvectors every ``frequency`` steps."""

    def __init__(self, params, frequency=10):
        super().__init__(params, {"lr": 1e-3, "frequency": frequency})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            renewed = []
            for p in group["params"]:
                if p.grad is None or p.ndim != 2:
                    continue
                state = self.state[p]
                if not state:
                    state["factors"] = [torch.eye(size) for size in p.shape]
                    state["bases"] = [torch.eye(size) for size in p.shape]
                state["factors"][0].lerp_(p.grad @ p.grad.T, 0.05)
                state["factors"][1].lerp_(p.grad.T @ p.grad, 0.05)
                if group["count"] % group["frequency"] == 0:
                    renewed.append((state, [torch.linalg.eigh(each)[1] for each in state["factors"]]))
                update = state["bases"][0].T @ p.grad @ state["bases"][1]
                p.sub_(update, alpha=group["lr"])
            for state, bases in renewed:
                state["bases"] = bases


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 384), nn.GELU(), nn.Linear(384, 256))
optimizer = Soap(model.parameters())
for _ in range(32):
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
