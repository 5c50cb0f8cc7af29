"""transformers: a small random model of a family, in a loop by hand.  FAMILY [eager|sdpa]"""

import sys

import torch
from families import build

torch.manual_seed(0)
family, attention = sys.argv[1], (sys.argv[2:] or [None])[0]
device = "cuda" if torch.cuda.is_available() else "cpu"
model, batches = build(family, attention)
model.to(device).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, batch in enumerate(batches):
    loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
