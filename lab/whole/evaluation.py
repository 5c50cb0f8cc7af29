"""unsloth-zoo#878, transformers#7232: an evaluation keeps the logits of all batches, then concatenates them."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(2048, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 2048))
optimizer = torch.optim.AdamW(model.parameters())


def evaluate():
    model.eval()
    with torch.no_grad():
        kept = [model(torch.randint(0, 2048, (4, 32))) for _ in range(20)]
        scores = torch.cat(kept)
    model.train()
    return scores.argmax(-1)


for step in range(60):
    tokens = torch.randint(0, 2048, (4, 33))
    logits = model(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 40 == 39:
        evaluate()
