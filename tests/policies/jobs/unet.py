"""A small U-Net: skip connections that live from the way down to the way up, BatchNorm, a loss for every pixel."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SIZE, WIDTH, CLASSES, BATCH = 32, 12, 4, 8


class Double(nn.Sequential):
    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__(
            nn.Conv2d(channels_in, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Double(3, WIDTH), Double(WIDTH, 2 * WIDTH), Double(2 * WIDTH, 4 * WIDTH)])
        self.up = nn.ModuleList([Double(4 * WIDTH, 2 * WIDTH), Double(2 * WIDTH, WIDTH)])
        self.widen = nn.ModuleList(
            [nn.ConvTranspose2d(4 * WIDTH, 2 * WIDTH, 2, stride=2), nn.ConvTranspose2d(2 * WIDTH, WIDTH, 2, stride=2)]
        )
        self.predict = nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, x):
        kept = []
        for number, block in enumerate(self.down):
            x = block(x)
            if number < 2:
                kept.append(x)
                x = F.max_pool2d(x, 2)
        for widen, block in zip(self.widen, self.up, strict=True):
            x = block(torch.cat([kept.pop(), widen(x)], dim=1))
        return self.predict(x)


def make_model():
    return UNet()


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_loader():
    images, labels = torch.randn(BATCH * 8, 3, SIZE, SIZE), torch.randint(CLASSES, (BATCH * 8, SIZE, SIZE))
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH)


def loss_of(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


if __name__ == "__main__":
    from training import train

    train(__doc__, make_loader, make_model, make_optimizer, loss_of)
