"""Learning-rate schedule, and an evaluation under no_grad every third step."""

import torch
from torch import nn

torch.manual_seed(24)
model = nn.Sequential(nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.5), nn.Linear(48, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=12)
held_out = torch.randn(200, 12)
held_out_labels = (held_out.sum(1) > 0).long()


def evaluate():
    model.eval()
    with torch.no_grad():
        correct = (model(held_out).argmax(1) == held_out_labels).float().mean()
    model.train()
    return correct.item()


for step in range(12):
    x = torch.randn(40, 12)
    loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    print(step, repr(loss.item()), scheduler.get_last_lr()[0])
    if step % 3 == 2:
        print("held out:", repr(evaluate()))
