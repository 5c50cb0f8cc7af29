"""Fine-tuning: a frozen trunk in no_grad, low-rank adapters trained, the weights loaded from a file first."""

import io

import torch
from torch import nn


class LowRank(nn.Module):
    def __init__(self, inner, rank=2):
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inner.in_features) / rank)
        self.up = nn.Parameter(torch.zeros(inner.out_features, rank))

    def forward(self, x):
        return self.inner(x) + x @ self.down.t() @ self.up.t()


torch.manual_seed(39)
trunk = nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
weights = io.BytesIO()
torch.save(trunk.state_dict(), weights)
weights.seek(0)
trunk.load_state_dict(torch.load(weights, weights_only=True))
trunk.eval()
head = nn.Sequential(LowRank(nn.Linear(96, 48)), nn.ReLU(), LowRank(nn.Linear(48, 2)))
trainable = [parameter for parameter in head.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-2)
for step in range(10):
    x = torch.randn(64, 24)
    with torch.no_grad():
        features = trunk(x)
    loss = nn.functional.cross_entropy(head(features), (x[:, 0] > x[:, 1]).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
saved = io.BytesIO()
torch.save({"head": head.state_dict(), "optimizer": optimizer.state_dict()}, saved)
print(len(torch.load(io.BytesIO(saved.getvalue()), weights_only=True)["optimizer"]["state"]))
