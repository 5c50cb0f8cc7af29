"""Training steps of published convolutional networks, from their layers' shapes.

Time is arithmetic over a rate or bytes over a bandwidth, whichever is longer, for a card with 9.5 TFLOP/s and 500 GB/s
of which six tenths are reached; the backward of an operator takes twice its time. Sizes are those of float32.
"""

from __future__ import annotations

from memprof.trace.step import Step
from tests.planners.graphs import mirrored

_FLOPS_PER_US = 9.5e6 * 0.6
_BYTES_PER_US = 5e5 * 0.6


class _Layers:
    """Forward operators in order, each with one output of ``channels`` x ``side`` x ``side``."""

    def __init__(self, batch: int, side: int, channels: int = 3) -> None:
        self.batch = batch
        self.inputs: list[list[int]] = []
        self.sizes: list[int] = []
        self.times: list[float] = []
        self.channels: list[int] = []
        self.sides: list[int] = []
        self.parameters = 0
        self.workspaces: list[int] = []
        self._input = (channels, side)

    def of(self, op_id: int) -> tuple[int, int]:
        return (self.channels[op_id], self.sides[op_id]) if op_id >= 0 else self._input

    def add(self, inputs: list[int], channels: int, side: int, flops: float) -> int:
        size = 4 * self.batch * channels * side * side
        read = sum(4 * self.batch * self.of(other)[0] * self.of(other)[1] ** 2 for other in inputs)
        self.inputs.append([other for other in inputs if other >= 0])
        self.sizes.append(size)
        self.times.append(max(flops * self.batch / _FLOPS_PER_US, (size + read) / _BYTES_PER_US))
        self.channels.append(channels)
        self.sides.append(side)
        return len(self.sizes) - 1

    def convolution(self, op_id: int, channels: int, *, kernel: int = 3, stride: int = 1, groups: int = 1) -> int:
        before, side = self.of(op_id)
        side = -(-side // stride)
        self.parameters += before * channels * kernel * kernel // groups
        return self.add([op_id], channels, side, 2.0 * before * channels * kernel * kernel * side * side / groups)

    def same(self, *inputs: int) -> int:
        """Normalisation, activation or addition."""
        channels, side = self.of(inputs[0])
        return self.add(list(inputs), channels, side, 0.0)

    def pooled(self, op_id: int, stride: int = 2) -> int:
        channels, side = self.of(op_id)
        return self.add([op_id], channels, side // stride, 0.0)

    def dense(self, op_id: int, features: int) -> int:
        channels, side = self.of(op_id)
        self.parameters += channels * side * side * features
        return self.add([op_id], features, 1, 2.0 * channels * side * side * features)

    def step(self) -> Step:
        """Adds the loss and the backward; parameters are held with their gradients."""
        self.add([len(self.sizes) - 1], 1, 1, 0.0)
        return mirrored(
            self.inputs,
            self.sizes,
            self.times,
            needs_output=[True] * len(self.sizes),
            fixed_bytes=8 * self.parameters + 4 * self.batch * self._input[0] * self._input[1] ** 2,
        )


def vgg16(batch: int = 176) -> Step:
    """Builds VGG-16 (Simonyan 2014), activations within their convolutions."""
    layers, now = _Layers(batch, 224), -1
    for repeats, channels in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(repeats):
            now = layers.convolution(now, channels)
        now = layers.pooled(now)
    for features in (4096, 4096, 1000):
        now = layers.dense(now, features)
    return layers.step()


def resnet50(batch: int = 184) -> Step:
    """Builds ResNet-50 (He 2015), every normalisation, activation and addition on its own."""
    layers = _Layers(batch, 224)
    now = layers.same(layers.same(layers.convolution(-1, 64, kernel=7, stride=2)))
    now = layers.pooled(now)
    for repeats, channels in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(repeats):
            stride = 2 if block == 0 and channels > 64 else 1
            entry = now
            now = layers.same(layers.same(layers.convolution(now, channels, kernel=1, stride=stride)))
            now = layers.same(layers.same(layers.convolution(now, channels)))
            now = layers.same(layers.convolution(now, 4 * channels, kernel=1))
            if block == 0:
                entry = layers.same(layers.convolution(entry, 4 * channels, kernel=1, stride=stride))
            now = layers.same(layers.same(now, entry))
    layers.dense(layers.pooled(now, 7), 1000)
    return layers.step()


def mobilenet_v2(batch: int = 272) -> Step:
    """Builds MobileNetV2 (Sandler 2018)."""
    layers = _Layers(batch, 224)
    now = layers.same(layers.same(layers.convolution(-1, 32, stride=2)))
    plan = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, channels, repeats, first_stride in plan:
        for block in range(repeats):
            stride, entry = (first_stride if block == 0 else 1), now
            wide = layers.of(now)[0] * expansion
            if expansion > 1:
                now = layers.same(layers.same(layers.convolution(now, wide, kernel=1)))
            now = layers.same(layers.same(layers.convolution(now, wide, stride=stride, groups=wide)))
            now = layers.same(layers.convolution(now, channels, kernel=1))
            if stride == 1 and block:
                now = layers.same(now, entry)
    now = layers.same(layers.same(layers.convolution(now, 1280, kernel=1)))
    layers.dense(layers.pooled(now, 7), 1000)
    return layers.step()


def unet(batch: int = 11, side: int = 416) -> Step:
    """Builds U-Net (Ronneberger 2015) with padded convolutions."""
    layers, now, skips = _Layers(batch, side), -1, []
    for level in range(4):
        now = layers.convolution(layers.convolution(now, 64 << level), 64 << level)
        skips.append(now)
        now = layers.pooled(now)
    now = layers.convolution(layers.convolution(now, 1024), 1024)
    for level in reversed(range(4)):
        channels, size = layers.of(now)
        now = layers.add([now], channels, 2 * size, 0.0)
        now = layers.convolution(now, 64 << level, kernel=2)
        now = layers.add([skips[level], now], 128 << level, 2 * size, 0.0)
        now = layers.convolution(layers.convolution(now, 64 << level), 64 << level)
    layers.convolution(now, 2, kernel=1)
    return layers.step()
