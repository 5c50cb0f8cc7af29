"""ResNet-50: bottlenecks of convolutions, BatchNorm and in-place ReLU.

Source: He et al. 2016, "Deep Residual Learning for Image Recognition", table 1; the stride is in the 3x3 convolution.
"""

from __future__ import annotations

import training
from torch import nn

SIZES = {
    "tiny": {"width": 8, "stages": (1, 1, 1, 1), "pixels": 32, "classes": 10, "batch": 4},
    "base": {"width": 64, "stages": (3, 4, 6, 3), "pixels": 224, "classes": 1000, "batch": 64},
}


class Bottleneck(nn.Module):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, 4 * channels, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Sequential(nn.Conv2d(channels_in, 4 * channels, 1, stride, bias=False), nn.BatchNorm2d(4 * channels))
            if stride != 1 or channels_in != 4 * channels
            else nn.Identity()
        )

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width, stages, pixels, classes, batch):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks = nn.ModuleList()
        channels_in = width
        for stage, count in enumerate(stages):
            for number in range(count):
                channels = width << stage
                self.blocks.append(Bottleneck(channels_in, channels, 2 if stage and not number else 1))
                channels_in = 4 * channels
        self.head = nn.Linear(channels_in, classes)

    def forward(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


if __name__ == "__main__":
    training.run(__doc__, SIZES, ResNet, training.make_images)
