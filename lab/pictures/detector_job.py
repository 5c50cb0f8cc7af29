"""Trains an anchor-free object detector with a feature pyramid, for the gallery; images hold 1 to 60 boxes each.

After Tian et al., "FCOS: Fully Convolutional One-Stage Object Detection" (ICCV 2019): every location of every pyramid
level predicts classes, the distances to the four sides of its box, and how central it is in it.
"""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES, WIDTH, BATCH, HEIGHT_PX, WIDTH_PX = 80, 256, 8, 800, 1216
STRIDES, LIMITS = (8, 16, 32), (0, 64, 128, 10_000)
DEVICE = "cuda"


def convolve(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Sequential:
    """Returns a convolution, its normalization and a ReLU."""
    layers = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.GroupNorm(32, outputs)
    return nn.Sequential(*layers, nn.ReLU())


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Creates both, and the convolution of the shortcut."""
        super().__init__()
        self.body = nn.Sequential(convolve(inputs, outputs, 3, stride), convolve(outputs, outputs))
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output."""
        y: Tensor = self.body(x) + self.shortcut(x)
        return y


class Pyramid(nn.Module):
    """A residual backbone, whose last three stages are merged from coarse to fine."""

    def __init__(self) -> None:
        """Creates backbone and merging convolutions."""
        super().__init__()
        self.stem = nn.Sequential(convolve(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        sizes = (64, 64, 128, 256, 512)
        self.stages = nn.ModuleList(
            nn.Sequential(Block(before, after, 1 if before == after else 2), Block(after, after, 1))
            for before, after in pairwise(sizes)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(size, WIDTH, 1) for size in sizes[2:])
        self.smooth = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in sizes[2:])

    def forward(self, x: Tensor) -> list[Tensor]:
        """Returns one map of features for each stride, the finest first."""
        x, found = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        merged: Tensor | None = None
        levels = []
        for lateral, smooth, features in zip(self.lateral[::-1], self.smooth[::-1], found[:0:-1], strict=True):
            own = lateral(features)
            merged = own if merged is None else own + functional.interpolate(merged, size=own.shape[2:])
            levels.append(smooth(merged))
        return levels[::-1]


class Head(nn.Module):
    """Two towers of convolutions, which all levels share."""

    def __init__(self) -> None:
        """Creates the towers and their outputs."""
        super().__init__()
        self.classes = nn.Sequential(*(convolve(WIDTH, WIDTH) for _ in range(4)), nn.Conv2d(WIDTH, CLASSES, 3, 1, 1))
        self.boxes = nn.Sequential(*(convolve(WIDTH, WIDTH) for _ in range(4)), nn.Conv2d(WIDTH, 5, 3, 1, 1))

    def forward(self, features: Tensor) -> Tensor:
        """Returns classes, distances and centrality of each location, shape ``(batch, locations, classes + 5)``."""
        return torch.cat([self.classes(features), self.boxes(features)], 1).flatten(2).transpose(1, 2)


class Detector(nn.Module):
    """Pyramid and head."""

    def __init__(self) -> None:
        """Creates both."""
        super().__init__()
        self.pyramid, self.head = Pyramid(), Head()

    def forward(self, images: Tensor) -> Tensor:
        """Returns the predictions of all levels, the finest first."""
        return torch.cat([self.head(level) for level in self.pyramid(images)], 1)


def locations() -> tuple[Tensor, Tensor]:
    """Returns the centre of each location, and the range of box sizes that its level is for."""
    centres, ranges = [], []
    for stride, (least, most) in zip(STRIDES, pairwise(LIMITS), strict=True):
        y, x = torch.meshgrid(torch.arange(HEIGHT_PX // stride), torch.arange(WIDTH_PX // stride), indexing="ij")
        centres.append((torch.stack([x, y], -1).reshape(-1, 2) + 0.5) * stride)
        ranges.append(torch.tensor([float(least), float(most)]).expand(len(centres[-1]), 2))
    return torch.cat(centres).to(DEVICE), torch.cat(ranges).to(DEVICE)


def assign(boxes: Tensor, centres: Tensor, ranges: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distances from each location to the smallest box that it is in, and whether there is one."""
    distances = torch.cat([centres[:, None] - boxes[None, :, :2], boxes[None, :, 2:] - centres[:, None]], -1)
    largest = distances.amax(-1)
    suits = (distances.amin(-1) > 0) & (largest >= ranges[:, :1]) & (largest < ranges[:, 1:])
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    smallest, chosen = torch.where(suits, areas, torch.inf).min(1)
    return distances.gather(1, chosen[:, None, None].expand(-1, 1, 4))[:, 0], smallest < torch.inf


def loss_of(found: Tensor, boxes: Tensor, labels: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the loss of one image: focal for classes, overlap for boxes, cross-entropy for centrality."""
    wanted, inside = assign(boxes, *places)
    wanted, weight = wanted.clamp(min=1.0), inside.float()
    scores, distances, central = found[:, :CLASSES], found[:, CLASSES:-1].exp(), found[:, -1]
    target = functional.one_hot(labels[0].expand(len(found)), CLASSES) * weight[:, None]
    entropy = functional.binary_cross_entropy_with_logits(scores, target, reduction="none")
    chance = torch.sigmoid(scores)
    focal = (entropy * (target * (1 - chance) + (1 - target) * chance) ** 2).sum()
    shared = torch.minimum(distances, wanted)
    overlap = (shared[:, 0] + shared[:, 2]) * (shared[:, 1] + shared[:, 3])
    areas = [(one[:, 0] + one[:, 2]) * (one[:, 1] + one[:, 3]) for one in (distances, wanted)]
    miss = -torch.log(overlap / (areas[0] + areas[1] - overlap))
    sides = wanted[:, :2].minimum(wanted[:, 2:]) / wanted[:, :2].maximum(wanted[:, 2:])
    middle = functional.binary_cross_entropy_with_logits(central, sides.prod(-1).sqrt(), reduction="none")
    return (focal + ((miss + middle) * weight).sum()) / weight.sum().clamp(min=1)


def main() -> None:
    """Trains three steps."""
    random.seed(0)
    model, places = Detector().to(DEVICE), locations()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(3):
        images = torch.randn(BATCH, 3, HEIGHT_PX, WIDTH_PX, device=DEVICE)
        predicted = model(images)
        losses = []
        for found in predicted:
            count = random.randint(1, 60)
            corner = torch.rand(count, 2, device=DEVICE) * 600
            boxes = torch.cat([corner, corner + 8 + torch.rand(count, 2, device=DEVICE) * 192], 1)
            losses.append(loss_of(found, boxes, torch.randint(CLASSES, (count,), device=DEVICE), places))
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
