"""bitsandbytes: Adam with a state of 8 bits, or a frozen body packed in 4 bits.  adam8bit|linear4bit"""

import sys

import bitsandbytes as bnb
import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(0)
kind = sys.argv[1]
device = "cuda" if torch.cuda.is_available() else "cpu"
linear = bnb.nn.LinearNF4 if kind == "linear4bit" else nn.Linear
body = nn.Sequential(linear(128, 512), nn.GELU(), linear(512, 512), nn.GELU(), linear(512, 128))
model = nn.Sequential(nn.Linear(64, 128), body, nn.Linear(128, 16)).to(device)
if kind == "linear4bit":
    body.requires_grad_(False)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = (bnb.optim.Adam8bit if kind == "adam8bit" else torch.optim.AdamW)(trained, lr=1e-3)
for step in range(8):
    rows, labels = torch.randn(64, 64).to(device), torch.randint(0, 16, (64,)).to(device)
    loss = functional.cross_entropy(model(rows), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
