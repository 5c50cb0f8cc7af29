"""A vision transformer: patches of 16x16 pixels, a class token, attention over all patches.

Source: Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words", table 1 (ViT-Base).
"""

from __future__ import annotations

import torch
import training
from torch import nn
from torch.nn import functional as F

SIZES = {
    "tiny": {"layers": 2, "width": 48, "heads": 2, "pixels": 64, "classes": 10, "batch": 4},
    "base": {"layers": 12, "width": 768, "heads": 12, "pixels": 224, "classes": 1000, "batch": 32},
}
PATCH = 16


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, layers, width, heads, pixels, classes, batch):
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, (pixels // PATCH) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


if __name__ == "__main__":
    training.run(__doc__, SIZES, ViT, training.make_images)
