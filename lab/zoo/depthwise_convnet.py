"""MobileNet-style network of depthwise separable convolutions, squeeze-and-excitation and hard swish."""

import torch
import torch.nn.functional as F
from torch import nn


class SqueezeExcite(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.reduce = nn.Conv2d(channels, channels // 4, 1)
        self.expand = nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x):
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * F.hardsigmoid(self.expand(F.relu(self.reduce(scale), inplace=True)))


def separable(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU6(inplace=True),
        SqueezeExcite(inputs),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.Hardswish(inplace=True),
    )


torch.manual_seed(2)
net = nn.Sequential(
    nn.Conv2d(3, 16, 3, 2, 1, bias=False),
    nn.BatchNorm2d(16),
    nn.Hardswish(inplace=True),
    separable(16, 24, 1),
    separable(24, 48, 2),
    separable(48, 48, 1),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(48, 10),
)
net.train()
optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.9)
images = torch.randn(160, 3, 48, 48)
labels = torch.randint(10, (160,))
for i in range(10):
    x, y = images[i * 16 : (i + 1) * 16], labels[i * 16 : (i + 1) * 16]
    loss = F.cross_entropy(net(x), y, label_smoothing=0.1)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print(f"{i}: {loss.item()!r}")
