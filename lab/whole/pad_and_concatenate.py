"""transformers#26702: the logits of batches of other lengths are joined in a new padded tensor after each batch."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 512))
optimizer = torch.optim.AdamW(model.parameters())


def pad_and_concatenate(first, second):
    result = first.new_full((len(first) + len(second), max(first.shape[1], second.shape[1]), 512), -100.0)
    result[: len(first), : first.shape[1]] = first
    result[len(first) :, : second.shape[1]] = second
    return result


def evaluate():
    logits = None
    with torch.no_grad():
        for batch in range(16):
            out = model(torch.randint(512, (8, 24 + batch)))
            logits = out if logits is None else pad_and_concatenate(logits, out)
    return logits.argmax(-1)


for step in range(30):
    model(torch.randint(512, (8, 32))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 19:
        evaluate()
