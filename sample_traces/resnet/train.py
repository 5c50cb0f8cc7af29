"""Trains a small ResNet (BatchNorm, in-place ReLU, dropout) on synthetic images of separable classes."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

CLASSES = 10


class Stripes(Dataset):
    """Noisy stripes; the class is their direction."""

    def __init__(self, size: int, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(CLASSES, (count,), generator=generator)
        angles = self.labels * (torch.pi / CLASSES)
        rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        waves = angles.cos()[:, None, None] * rows + angles.sin()[:, None, None] * columns
        self.images = waves.sin()[:, None].repeat(1, 3, 1, 1)
        self.images += 0.5 * torch.randn(self.images.shape, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


class ResidualUnit(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), units: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)
        )
        stages = []
        channels_in = widths[0]
        for stage, channels in enumerate(widths):
            for unit in range(units):
                stages.append(ResidualUnit(channels_in, channels, stride=2 if stage > 0 and unit == 0 else 1))
                channels_in = channels
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.classify = nn.Linear(channels_in, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.stages(self.stem(x)))
        return self.classify(self.dropout(x.flatten(1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-final", metavar="PATH", help="save the final parameters here")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    dataset = Stripes(args.image_size, count=args.batch_size * 6, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate, momentum=0.9, weight_decay=1e-4)

    model.train()
    step = 0
    while step < args.steps:
        for images, labels in loader:
            if step == args.steps:
                break
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item()!r}", flush=True)
            step += 1

    if args.save_final:
        torch.save(model.state_dict(), args.save_final)


if __name__ == "__main__":
    main()
