"""Siamese network: one tower called three times with shared weights, triplet loss."""

import torch
from torch import nn


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 3), nn.ReLU(inplace=True)
        )
        self.embed = nn.Linear(16 * 16, 16)

    def forward(self, x):
        x = self.features(x)
        return nn.functional.normalize(self.embed(nn.functional.adaptive_max_pool2d(x, 4).flatten(1)))


torch.manual_seed(22)
tower = Tower()
optimizer = torch.optim.Adagrad(tower.parameters(), lr=0.01)
criterion = nn.TripletMarginLoss(margin=0.5)
patterns = torch.randn(6, 1, 20, 20)
for step in range(10):
    kinds = torch.randint(6, (16,))
    others = (kinds + torch.randint(1, 6, (16,))) % 6
    anchor, positive, negative = (patterns[k] + 0.4 * torch.randn(16, 1, 20, 20) for k in (kinds, kinds, others))
    loss = criterion(tower(anchor), tower(positive), tower(negative))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, repr(loss.item()))
