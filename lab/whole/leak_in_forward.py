"""A list outside of the model grows inside its forward in every second call: no such call may be skipped."""

import torch
from torch import nn

calls = []


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        hidden = self.a(x).relu()
        calls.append(hidden.detach() if len(calls) % 2 else None)
        return self.b(hidden)


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(40):
    model(torch.randn(128, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
