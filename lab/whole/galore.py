"""GaLore (jiaweizzz/GaLore): the projector's SVD every `update_proj_gap` steps is the peak of the run."""

import torch
from torch import nn


class Projected(torch.optim.Optimizer):
    """AdamW in a low-rank space whose basis is renewed every ``gap`` steps."""

    def __init__(self, params, rank=32, gap=30):
        super().__init__(params, {"lr": 1e-3, "rank": rank, "gap": gap})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or p.ndim != 2:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                if state["step"] % group["gap"] == 0:
                    state["basis"] = torch.linalg.svd(p.grad, full_matrices=False)[0][:, : group["rank"]].clone()
                low = state["basis"].T @ p.grad
                if "avg" not in state:
                    state["avg"], state["sq"] = torch.zeros_like(low), torch.zeros_like(low)
                state["step"] += 1
                state["avg"].lerp_(low, 0.1)
                state["sq"].mul_(0.99).addcmul_(low, low, value=0.01)
                p.sub_(state["basis"] @ (state["avg"] / state["sq"].sqrt().add(1e-8)), alpha=group["lr"])


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256))
optimizer = Projected(model.parameters())
for _ in range(70):
    model(torch.randn(16, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
