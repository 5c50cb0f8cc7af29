"""Generation during training (GRPO, trl#3481): every tenth step samples with a growing cache of keys and values."""

import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(1024, 128), nn.Linear(128, 384)
        self.out, self.head = nn.Linear(128, 128), nn.Linear(128, 1024)

    def forward(self, tokens, cache=None):
        q, k, v = self.mix(self.embed(tokens)).chunk(3, -1)
        if cache is not None:
            k, v = torch.cat((cache[0], k), 1), torch.cat((cache[1], v), 1)
        x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.head(self.out(x)), (k, v)


torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(33):
    tokens = torch.randint(0, 1024, (4, 33))
    logits, _ = model(tokens[:, :-1])
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        model.eval()
        with torch.no_grad():
            logits, cache = model(torch.randint(0, 1024, (64, 8)))
            for _ in range(24):
                logits, cache = model(logits[:, -1:].argmax(-1), cache)
        model.train()
