"""Networks of random weights in the shapes that the scripts expect, smaller than the published ones."""

from __future__ import annotations

import enum
import itertools
from typing import Any

import torch
from torch import nn


class VGG16_Weights(enum.Enum):  # noqa: N801 - torchvision's name
    """Names of weights; none are loaded."""

    IMAGENET1K_V1 = 1


class _Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for block in ((16, 16), (32, 32), (64, 64, 64), (64, 64, 64)):
            for width in block:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)


def vgg16(weights: Any = None) -> nn.Module:
    """Returns a network whose features are stacked as VGG16's are."""
    return _Features()


class _Block(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(images)))))
        return self.relu(hidden + self.downsample(images))


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        widths = (64, 16, 16, 32, 32, 48, 48, 64, 64)
        self.layers = nn.Sequential(*(_Block(a, b, 2 if a < b else 1) for a, b in itertools.pairwise(widths)))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(64, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        return self.fc(self.avgpool(self.layers(hidden)).flatten(1))


def resnet18(**options: Any) -> nn.Module:
    """Returns a residual network of eight blocks."""
    return _Residual()


def resnet50(**options: Any) -> nn.Module:
    """Returns the same; other libraries import the name."""
    return _Residual()
