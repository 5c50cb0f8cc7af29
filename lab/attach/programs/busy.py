"""A transformer trained at full speed, without a pause: busy.py STEPS [subclass]."""

import sys

import torch
from paced import ready
from torch import nn

torch.manual_seed(8)
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 3, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


class Tagged(torch.Tensor):
    """A subclass whose operators return it again."""


for number in range(int(sys.argv[1])):
    x = torch.randn(8, 32, 64)
    if sys.argv[2:] == ["subclass"]:
        x = x.as_subclass(Tagged)
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number == 20:
        ready()
    if number % 20 == 0:
        print(number, type(loss).__name__, repr(loss.item()))
