"""ResNet-50 as torchvision writes it, as a classifier of images and as the backbone of TSN."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from families.gradient_buckets import gradient_buckets
from families.setting import DEVICE, STEPS, expect_parameters
from torch import nn

# torchvision's documentation of resnet50, for 1,000 classes.
PARAMETERS = 25_557_032


class Bottleneck(nn.Module):
    """1x1, 3x3 (which has the stride) and 1x1 convolutions around a shortcut, ReLU in place."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


def backbone() -> nn.Sequential:
    """Returns stem and sixteen bottlenecks: (images, 3, 224, 224) to (images, 2048, 7, 7)."""
    parts: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    inputs = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(depth):
            parts.append(Bottleneck(inputs, width, stride if index == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*parts)


def classify(batch: int, precision: torch.dtype) -> None:
    """Trains on one batch of images that stays on the device; below float32 under autocast and a GradScaler.

    The published loop is a function that returns loss.item(), so nothing of a step outlives it but the gradients.
    """
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    model = nn.Sequential(backbone(), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(2048, 1000))
    expect_parameters(model, PARAMETERS)
    model.to(DEVICE).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    mixed = precision != torch.float32
    scaler = torch.amp.GradScaler("cuda", enabled=mixed)
    images = torch.randn(batch, 3, 224, 224, device=DEVICE)
    labels = torch.randint(0, 1000, (batch,), device=DEVICE)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", precision) if mixed else nullcontext():
            outputs = model(images)
            loss = F.cross_entropy(outputs, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        del outputs, loss


class SegmentNetwork(nn.Module):
    """TSN: the backbone on every frame, averaged over the frames of a video, dropout 0.4, a linear layer."""

    def __init__(self, segments: int, classes: int) -> None:
        super().__init__()
        self.segments = segments
        self.backbone = backbone()
        self.pool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(0.4)
        self.head = nn.Linear(2048, classes)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        features = self.pool(self.backbone(frames))
        features = features.reshape((-1, self.segments, *features.shape[1:]))
        features = features.mean(dim=1, keepdim=True).squeeze(1)
        features = self.dropout(features)
        return self.head(features.view(features.size(0), -1))


def classify_videos(videos: int, segments: int, classes: int) -> None:
    """Trains TSN as MMAction2 does: SGD one parameter at a time, clipped gradients zeroed in place, DDP's buckets."""
    model = SegmentNetwork(segments, classes)
    expect_parameters(model, PARAMETERS - 2049 * (1000 - classes))
    model.to(DEVICE).train()
    buckets = gradient_buckets(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.0005, foreach=False)
    for _ in range(STEPS):
        frames = torch.randn(videos, segments, 3, 224, 224).to(DEVICE)
        labels = torch.randint(0, classes, (videos,)).to(DEVICE)
        loss = F.cross_entropy(model(frames.reshape((-1, *frames.shape[2:]))), labels)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 40.0, foreach=False)
        optimizer.step()
    del buckets
