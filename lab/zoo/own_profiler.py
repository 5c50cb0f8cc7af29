"""The script profiles itself with torch.profiler and prints what it saw: a recorder must not take its session."""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

torch.manual_seed(34)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = {}
for step in range(12):
    x = torch.randn(20, 16)

    def train():
        loss = model(x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    if step in (3, 7, 10):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            print(step, repr(train()))
        averages = profiler.key_averages()
        counts = {average.key: average.count for average in averages}
        bytes_ = {average.key: average.cpu_memory_usage for average in averages}
        print("  addmm", counts.get("aten::addmm"), bytes_.get("aten::addmm"))
        print("  optimizer", [count for key, count in counts.items() if key.startswith("Optimizer.step")])
    else:
        print(step, repr(train()))
