"""C3D and R(2+1)D-34 as MMAction2 writes them, and its training of both."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from families.gradient_buckets import gradient_buckets
from families.setting import DEVICE, STEPS, expect_parameters, report_peak
from torch import nn


def convolved(inputs: int, outputs: int) -> list[nn.Module]:
    """Returns C3D's 3x3x3 convolution and its ReLU in place; C3D has no norms."""
    return [nn.Conv3d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]


class C3D(nn.Module):
    """Eight convolutions, five poolings, three linear layers for clips of 16 frames of 112 x 112."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *convolved(3, 64),
            nn.MaxPool3d((1, 2, 2), (1, 2, 2)),
            *convolved(64, 128),
            nn.MaxPool3d(2, 2),
            *convolved(128, 256),
            *convolved(256, 256),
            nn.MaxPool3d(2, 2),
            *convolved(256, 512),
            *convolved(512, 512),
            nn.MaxPool3d(2, 2),
            *convolved(512, 512),
            *convolved(512, 512),
            nn.MaxPool3d(2, 2, padding=(0, 1, 1)),
        )
        self.fc6 = nn.Linear(8192, 4096)
        self.fc7 = nn.Linear(4096, 4096)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(0.5)
        self.head_dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4096, classes)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        x = self.features(clips).flatten(start_dim=1)
        x = self.dropout(self.relu(self.fc6(x)))
        x = self.relu(self.fc7(x))
        return self.head(self.head_dropout(x))


class Factored(nn.Module):
    """A convolution over space, norm, ReLU, then one over time, as wide between as keeps a full one's parameters."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int, int], stride: tuple[int, int, int]) -> None:
        super().__init__()
        time, space, _ = kernel
        area = space * space
        between = int(3 * inputs * outputs * area / (inputs * area + 3 * outputs))
        self.space = nn.Conv3d(
            inputs,
            between,
            (1, space, space),
            stride=(1, *stride[1:]),
            padding=(0, space // 2, space // 2),
            bias=False,
        )
        self.norm = nn.BatchNorm3d(between)
        self.relu = nn.ReLU(inplace=True)
        self.time = nn.Conv3d(
            between, outputs, (time, 1, 1), stride=(stride[0], 1, 1), padding=(time // 2, 0, 0), bias=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.time(self.relu(self.norm(self.space(x))))


class BasicLayer(nn.Module):
    """Two factored convolutions around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        strides = (stride, stride, stride)
        self.conv1 = Factored(inputs, width, (3, 3, 3), strides)
        self.bn1 = nn.BatchNorm3d(width, eps=1e-3)
        self.conv2 = Factored(width, width, (3, 3, 3), (1, 1, 1))
        self.bn2 = nn.BatchNorm3d(width, eps=1e-3)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != width:
            self.downsample = nn.Sequential(
                Factored(inputs, width, (1, 1, 1), strides), nn.BatchNorm3d(width, eps=1e-3)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out = out + identity
        return self.relu(out)


class R2Plus1D(nn.Module):
    """The residual network of 34 layers in factored convolutions, for clips of 224 x 224."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        parts: list[nn.Module] = [
            Factored(3, 64, (3, 7, 7), (1, 2, 2)),
            nn.BatchNorm3d(64, eps=1e-3),
            nn.ReLU(inplace=True),
            nn.MaxPool3d((1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1)),
        ]
        inputs = 64
        for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(depth):
                parts.append(BasicLayer(inputs, width, stride if index == 0 else 1))
                inputs = width
        self.features = nn.Sequential(*parts)
        self.pool = nn.AdaptiveAvgPool3d((1, 1, 1))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(512, classes)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.pool(self.features(clips)))
        return self.head(x.view(x.shape[0], -1))


def train(
    model: nn.Module,
    parameters: int,
    clips: tuple[int, int, int],
    classes: int,
    *,
    is_new: bool = False,
    is_nesterov: bool = False,
    of_frames: bool = False,
) -> None:
    """Trains one GPU's share: SGD with clipped gradients and DDP's buckets.

    MMAction2 0.x zeroed gradients in place before backward, and torch updated one parameter at a time. 1.x takes frames
    as bytes and drops gradients after the update.

    Args:
        model: the network, on the CPU.
        parameters: how many parameters the published one has.
        clips: clips of a batch, frames of a clip, pixels of a side.
        classes: of the data set.
        is_new: as MMAction2 1.x, on torch 2.0.
        is_nesterov: the momentum is Nesterov's.
        of_frames: the network takes frames as images.
    """
    expect_parameters(model, parameters)
    model.to(DEVICE).train()
    buckets = gradient_buckets(model)
    foreach = None if is_new else False
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.0005, foreach=foreach, nesterov=is_nesterov
    )
    batch, frames, side = clips
    for _ in range(STEPS):
        if is_new:
            inputs = normalized(batch, (frames, 3, side, side) if of_frames else (3, frames, side, side))
        else:
            inputs = torch.randn(batch, 3, frames, side, side).to(DEVICE)
        labels = torch.randint(0, classes, (batch,)).to(DEVICE)
        loss = F.cross_entropy(model(inputs.flatten(0, 1) if of_frames else inputs), labels)
        del inputs  # a variable of DDP's forward
        if not is_new:
            optimizer.zero_grad(set_to_none=False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 40.0, foreach=foreach)
        optimizer.step()
        if is_new:
            optimizer.zero_grad()
    del buckets
    report_peak(allocated=torch.cuda.max_memory_allocated())


def train_c3d(classes: int, clips: tuple[int, int, int]) -> None:
    """Trains C3D on clips of a shape."""
    train(C3D(classes), 78_409_573, clips, classes)


def train_r2plus1d(classes: int, clips: tuple[int, int, int]) -> None:
    """Trains R(2+1)D-34 on clips of a shape."""
    train(R2Plus1D(classes), 63_759_281, clips, classes)


def normalized(batch: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns clips of a shape that came to the device as bytes, normed there [clip, *shape]."""
    pixels = [torch.zeros(shape, dtype=torch.uint8).to(DEVICE) for _ in range(batch)]
    stacked = torch.stack(pixels)
    mean = torch.full((3, 1, 1) if shape[1] == 3 else (3, 1, 1, 1), 120.0, device=DEVICE)
    return (stacked - mean) / mean
