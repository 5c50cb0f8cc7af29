"""A U-Net: what the way down makes is kept for the way up; a loss for every pixel.

Source: Ronneberger, Fischer, Brox 2015, "U-Net", with BatchNorm and padded convolutions.
"""

from __future__ import annotations

import torch
import training
from torch import nn
from torch.nn import functional as F

SIZES = {
    "tiny": {"width": 8, "levels": 2, "pixels": 32, "classes": 3, "batch": 2},
    "base": {"width": 64, "levels": 4, "pixels": 256, "classes": 19, "batch": 8},
}


class Double(nn.Sequential):
    def __init__(self, channels_in, channels):
        super().__init__(
            nn.Conv2d(channels_in, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, width, levels, pixels, classes, batch):
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(
            Double(3 if not level else widths[level - 1], widths[level]) for level in range(levels)
        )
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * one, one, 2, stride=2) for one in widths[-2::-1])
        self.up = nn.ModuleList(Double(2 * one, one) for one in widths[-2::-1])
        self.predict = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        kept = []
        for block in self.down:
            x = block(x if not kept else F.max_pool2d(x, 2))
            kept.append(x)
        kept.pop()
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat([kept.pop(), widen(x)], dim=1))
        return self.predict(x)


def make_data(size):
    shape = (size["batch"], size["pixels"], size["pixels"])
    return torch.randn(size["batch"], 3, *shape[1:]), torch.randint(size["classes"], shape)


if __name__ == "__main__":
    training.run(__doc__, SIZES, UNet, make_data)
