"""Meta-learning by gradients through gradients on sine waves (MAML), in plain torch.

Written for this table.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

RATE = 0.01


def main() -> None:
    """Adapts to eight tasks a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), 0.001)
    for step in range(9):
        total = torch.zeros(())
        for _ in range(8):
            points, phase = torch.rand(40, 1) * 10 - 5, 3 * torch.rand(())
            values = torch.sin(points + phase)
            adapted = dict(model.named_parameters())
            for _ in range(3):
                loss = F.mse_loss(functional_call(model, adapted, (points[::2],)), values[::2])
                gradients = torch.autograd.grad(loss, tuple(adapted.values()), create_graph=True)
                pairs = zip(adapted.items(), gradients, strict=True)
                adapted = {name: value - RATE * gradient for (name, value), gradient in pairs}
            total = total + F.mse_loss(functional_call(model, adapted, (points[1::2],)), values[1::2]) / 8
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        print(f"step {step} loss {total.item():.6f}")


if __name__ == "__main__":
    main()
