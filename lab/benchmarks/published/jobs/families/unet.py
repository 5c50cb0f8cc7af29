"""U-Net with FCN heads as MMSegmentation writes it (UNet-S5-D16), and its training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from families.gradient_buckets import gradient_buckets
from families.setting import DEVICE, STEPS, expect_parameters
from torch import nn

WIDTH, STAGES, IMAGES = 64, 5, 4


def convolved(inputs: int, outputs: int, kernel: int = 3) -> nn.Sequential:
    """Returns a convolution without bias, its norm and ReLU in place."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Up(nn.Module):
    """Doubles a map bilinearly, narrows it by a 1x1 convolution, joins the encoder's map, convolves twice."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.upsample = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), convolved(inputs, outputs, 1)
        )
        self.convolutions = nn.Sequential(convolved(2 * outputs, outputs), convolved(outputs, outputs))

    def forward(self, skip: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = self.upsample(x)
        out = torch.cat([skip, x], dim=1)
        return self.convolutions(out)


class Head(nn.Module):
    """One convolution, dropout of whole channels, a 1x1 convolution to the classes."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.convolution = convolved(inputs, 64)
        self.dropout = nn.Dropout2d(0.1)
        self.classify = nn.Conv2d(64, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.dropout(self.convolution(x)))

    def loss(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean cross entropy and the accuracy in percent, of logits resized to the labels."""
        logits = F.interpolate(self(x), size=labels.shape[2:], mode="bilinear", align_corners=False)
        labels = labels.squeeze(1)
        loss = F.cross_entropy(logits, labels, reduction="none", ignore_index=255).mean()
        _, guesses = logits.topk(1, dim=1)
        guesses = guesses.transpose(0, 1)
        right = guesses.eq(labels.unsqueeze(0).expand_as(guesses))
        return loss, right[:1].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / labels.numel())


class UNet(nn.Module):
    """Five encoder stages of two convolutions, four decoder stages, a head and an auxiliary head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.encoder = nn.ModuleList()
        self.decoder = nn.ModuleList()
        inputs = 3
        for stage in range(STAGES):
            width = WIDTH * 2**stage
            pool = [nn.MaxPool2d(2)] if stage else []
            self.encoder.append(nn.Sequential(*pool, convolved(inputs, width), convolved(width, width)))
            if stage:
                self.decoder.append(Up(width, width // 2))
            inputs = width
        self.head = Head(WIDTH, classes)
        self.auxiliary = Head(2 * WIDTH, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x, encoded = images, []
        for stage in self.encoder:
            x = stage(x)
            encoded.append(x)
        decoded = [x]
        for index in range(STAGES - 2, -1, -1):
            x = self.decoder[index](encoded[index], x)
            decoded.append(x)
        loss, _accuracy = self.head.loss(decoded[4], labels)
        auxiliary, _auxiliary_accuracy = self.auxiliary.loss(decoded[3], labels)
        return loss + 0.4 * auxiliary


def train(height: int, width: int, classes: int, parameters: int) -> None:
    """Trains on crops, 4 for each GPU: SGD one parameter at a time, gradients zeroed in place, DDP's buckets."""
    model = UNet(classes)
    expect_parameters(model, parameters)
    model.to(DEVICE).train()
    buckets = gradient_buckets(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.0005, foreach=False)
    for _ in range(STEPS):
        images = torch.randn(IMAGES, 3, height, width).to(DEVICE)
        labels = torch.randint(0, classes, (IMAGES, 1, height, width)).to(DEVICE)
        loss = model(images, labels)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
    del buckets
