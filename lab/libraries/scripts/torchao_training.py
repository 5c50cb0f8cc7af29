"""torchao: a transformer with an optimizer whose state has 8 or 4 bits, or with products in float8.

adamw8bit|adamw4bit|float8
"""

import sys

import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(0)
kind = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
model = nn.Sequential(
    nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Flatten(), nn.Linear(32 * 128, 16)
)
model.to(device)
if kind == "float8":
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig(emulate=device == "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
else:
    from torchao.optim import AdamW4bit, AdamW8bit

    optimizer = {"adamw8bit": AdamW8bit, "adamw4bit": AdamW4bit}[kind](model.parameters(), lr=1e-3)
for step in range(8):
    rows, labels = torch.randn(16, 32, 128).to(device), torch.randint(0, 16, (16,)).to(device)
    loss = functional.cross_entropy(model(rows), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
