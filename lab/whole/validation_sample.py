"""litgpt#592: a sample is generated after each validation, with a cache for the longest text beside the training."""

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(512, 128), nn.Linear(128, 384), nn.Linear(128, 512)

    def forward(self, tokens, cache=None, place=0):
        query, key, value = self.mix(self.embed(tokens)).chunk(3, -1)
        if cache is not None:
            cache[0][:, place], cache[1][:, place] = key[:, 0], value[:, 0]
            key, value = cache
        return self.head((query @ key.mT).softmax(-1) @ value)


torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters())


@torch.no_grad()
def generate(length=24):
    cache, token = torch.zeros(2, 16, 1024, 128), torch.zeros(16, 1, dtype=torch.int64)
    for place in range(length):
        token = model(token, cache, place).argmax(-1)
    return token


for step in range(30):
    model(torch.randint(512, (4, 64))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 14:
        generate()
