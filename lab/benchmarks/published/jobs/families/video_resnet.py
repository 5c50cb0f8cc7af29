"""Residual networks over clips as MMAction2 writes them: SlowOnly, I3D, SlowFast and channel-separated ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

#: Blocks of each stage, by depth.
BLOCKS = {50: (3, 4, 6, 3), 152: (3, 8, 36, 3)}
Triple = tuple[int, int, int]


def convolved(
    inputs: int, outputs: int, kernel: Triple, stride: Triple = (1, 1, 1), *, groups: int = 1, is_active: bool = True
) -> nn.Sequential:
    """Returns a convolution, its norm, and where it is active a ReLU in place."""
    padding = tuple(size // 2 for size in kernel)
    parts: list[nn.Module] = [
        nn.Conv3d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False, groups=groups),
        nn.BatchNorm3d(outputs),
    ]
    return nn.Sequential(*parts, *[nn.ReLU(inplace=True)] * is_active)


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut.

    Args:
        inputs: Channels of the input.
        width: Channels between.
        stride: In time, and in y and x.
        is_inflated: The first convolution spans three frames.
        is_separated: The second convolution spans three frames, each channel alone.
    """

    def __init__(
        self, inputs: int, width: int, stride: tuple[int, int], *, is_inflated: bool, is_separated: bool
    ) -> None:
        super().__init__()
        time, space = stride
        strides = (time, space, space)
        first = (3, 1, 1) if is_inflated and not is_separated else (1, 1, 1)
        second = (3, 3, 3) if is_separated else (1, 3, 3)
        self.conv1 = convolved(inputs, width, first)
        self.conv2 = convolved(width, width, second, strides, groups=width if is_separated else 1)
        self.conv3 = convolved(width, 4 * width, (1, 1, 1), is_active=False)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if strides != (1, 1, 1) or inputs != 4 * width:
            self.downsample = convolved(inputs, 4 * width, (1, 1, 1), strides, is_active=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.conv3(self.conv2(self.conv1(x)))
        if self.downsample is not None:
            identity = self.downsample(x)
        out = out + identity
        return self.relu(out)


class Pathway(nn.Module):
    """Stem, pooling and four stages.

    Args:
        depth: 50 or 152 layers.
        width: Channels of the stem.
        stem: Kernel of the stem.
        inflated: Whether each block of each stage spans three frames.
        stem_stride, pool_stride: In time.
        time_strides: Of the stages.
        is_separated: Channels are convolved apart.
        has_second_pool: Frames are pooled in pairs after the first stage.
        lateral: Channels that come from another pathway before each stage.
    """

    def __init__(
        self,
        depth: int = 50,
        *,
        width: int = 64,
        stem: Triple,
        inflated: Sequence[Sequence[int]],
        stem_stride: int = 1,
        pool_stride: int = 1,
        time_strides: Sequence[int] = (1, 1, 1, 1),
        is_separated: bool = False,
        has_second_pool: bool = False,
        lateral: Sequence[int] = (0, 0, 0, 0),
    ) -> None:
        super().__init__()
        self.conv1 = convolved(3, width, stem, (stem_stride, 2, 2))
        self.maxpool = nn.MaxPool3d((1, 3, 3), stride=(pool_stride, 2, 2), padding=(0, 1, 1))
        self.second_pool = nn.MaxPool3d((2, 1, 1), stride=(2, 1, 1)) if has_second_pool else None
        self.stages = nn.ModuleList()
        inputs = width
        for index, count in enumerate(BLOCKS[depth]):
            inputs += lateral[index]
            blocks = []
            for number in range(count):
                stride = (time_strides[index], 1 if index == 0 else 2) if number == 0 else (1, 1)
                flags = inflated[index]
                is_inflated = bool(flags[number % len(flags)])
                blocks.append(
                    Bottleneck(inputs, width << index, stride, is_inflated=is_inflated, is_separated=is_separated)
                )
                inputs = 4 * (width << index)
            self.stages.append(nn.Sequential(*blocks))

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.conv1(clips))
        for index, stage in enumerate(self.stages):
            x = stage(x)
            if index == 0 and self.second_pool is not None:
                x = self.second_pool(x)
        return x


class Classifier(nn.Module):
    """A pathway, averaged, dropout, and a linear layer."""

    def __init__(self, pathway: Pathway, classes: int = 400) -> None:
        super().__init__()
        self.pathway = pathway
        self.pool = nn.AdaptiveAvgPool3d((1, 1, 1))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(2048, classes)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.pool(self.pathway(clips)))
        return self.head(x.view(x.shape[0], -1))


class SlowFast(nn.Module):
    """A pathway of an eighth of the frames, and one of all of them with an eighth of the channels which joins it."""

    def __init__(self, classes: int = 400) -> None:
        super().__init__()
        lateral = (16, 64, 128, 256)
        self.slow = Pathway(stem=(1, 7, 7), inflated=((0,), (0,), (1,), (1,)), lateral=lateral)
        self.fast = Pathway(width=8, stem=(5, 7, 7), inflated=((1,),) * 4)
        self.laterals = nn.ModuleList(
            nn.Conv3d(count // 2, count, (5, 1, 1), stride=(8, 1, 1), padding=(2, 0, 0), bias=False)
            for count in lateral
        )
        self.pool = nn.AdaptiveAvgPool3d((1, 1, 1))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(2304, classes)

    def forward(self, clips: torch.Tensor) -> torch.Tensor:
        slow = F.interpolate(clips, mode="nearest", scale_factor=(0.125, 1.0, 1.0))
        slow = self.slow.maxpool(self.slow.conv1(slow))
        fast = F.interpolate(clips, mode="nearest", scale_factor=(1.0, 1.0, 1.0))
        fast = self.fast.maxpool(self.fast.conv1(fast))
        for index, lateral in enumerate(self.laterals):
            from_fast = lateral(fast)
            slow = torch.cat((slow, from_fast), dim=1)
            slow = self.slow.stages[index](slow)
            fast = self.fast.stages[index](fast)
        x = torch.cat((self.pool(fast), self.pool(slow)), dim=1)
        x = self.dropout(x)
        return self.head(x.view(x.size(0), -1))


def make_slow_only() -> nn.Module:
    """Returns SlowOnly of 50 layers for Kinetics-400."""
    return Classifier(Pathway(stem=(1, 7, 7), inflated=((0,), (0,), (1,), (1,))))


def make_inflated() -> nn.Module:
    """Returns I3D of 50 layers for Kinetics-400."""
    inflated = ((1, 1, 1), (1, 0, 1, 0), (1, 0, 1, 0, 1, 0), (0, 1, 0))
    return Classifier(Pathway(stem=(5, 7, 7), inflated=inflated, stem_stride=2, pool_stride=2, has_second_pool=True))


def make_separated(*, has_frozen_norms: bool) -> nn.Module:
    """Returns the channel-separated network of 152 layers for Kinetics-400."""
    pathway = Pathway(152, stem=(3, 7, 7), inflated=((1,),) * 4, time_strides=(1, 2, 2, 2), is_separated=True)
    model = Classifier(pathway)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm3d):
            module.eps = 1e-3
            if has_frozen_norms:
                module.requires_grad_(False)
                module.train = lambda mode=True, module=module: module  # stays in evaluation
                nn.Module.train(module, False)
    return model
