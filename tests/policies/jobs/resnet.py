"""A small ResNet: convolutions, BatchNorm, in-place ReLU, dropout, SGD with momentum."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SIZE, CLASSES, BATCH = 24, 10, 12


class Unit(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.1)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x):
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(self.dropout(out)))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.stages = nn.Sequential(Unit(16, 16, 1), Unit(16, 16, 1), Unit(16, 32, 2), Unit(32, 32, 1), Unit(32, 64, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(64, CLASSES)

    def forward(self, x):
        return self.classify(self.pool(self.stages(self.stem(x))).flatten(1))


def make_model():
    return ResNet()


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_loader():
    images, labels = torch.randn(BATCH * 8, 3, SIZE, SIZE), torch.randint(CLASSES, (BATCH * 8,))
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH)


def loss_of(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


if __name__ == "__main__":
    from training import train

    train(__doc__, make_loader, make_model, make_optimizer, loss_of)
