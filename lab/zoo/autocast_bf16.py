"""Mixed precision on CPU: autocast to bfloat16, no gradient scaler."""

import torch
from torch import nn

torch.manual_seed(13)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.GroupNorm(2, 8),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(8 * 196, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(10):
    images, labels = torch.randn(16, 1, 28, 28), torch.randint(10, (16,))
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(step, repr(loss.item()))
