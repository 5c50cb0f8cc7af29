"""A GPT: LayerNorm, causal attention, GELU, a head over a whole vocabulary."""

from __future__ import annotations

import torch
import training
from torch import nn
from torch.nn import functional as F

SIZES = {
    "tiny": {"layers": 2, "width": 64, "heads": 2, "length": 32, "vocabulary": 256, "batch": 4},
    "small": {"layers": 12, "width": 768, "heads": 12, "length": 1024, "vocabulary": 50304, "batch": 4},
    "medium": {"layers": 24, "width": 1024, "heads": 16, "length": 512, "vocabulary": 50304, "batch": 4},
}


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, length, vocabulary, batch):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


if __name__ == "__main__":
    training.run(__doc__, SIZES, GPT, training.make_words)
