"""Models of particular kinds in the usual loop: models.py NAME."""

import torch
import torch.nn.functional as F
from torch import nn
from usual_loop import main


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


def depthwise_convnet():
    """MobileNet-style network of depthwise separable convolutions, squeeze-and-excitation and hard swish."""
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish(inplace=True)]
    body = [separable(16, 24, 1), separable(24, 48, 2), separable(48, 48, 1)]
    net = nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(48, 10))
    images, labels = torch.randn(160, 3, 48, 48), torch.randint(10, (160,))

    def loss_of(step):
        rows = slice(step * 16, (step + 1) * 16)
        return F.cross_entropy(net(images[rows]), labels[rows], label_smoothing=0.1)

    return torch.optim.RMSprop(net.parameters(), lr=1e-3, momentum=0.9), loss_of


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(inplace=True), nn.Conv2d(8, 16, 3), nn.ReLU(inplace=True)
        )
        self.embed = nn.Linear(16 * 16, 16)

    def forward(self, x):
        return F.normalize(self.embed(F.adaptive_max_pool2d(self.features(x), 4).flatten(1)))


def siamese():
    """Siamese network: one tower called three times with shared weights, triplet loss."""
    tower = Tower()
    criterion = nn.TripletMarginLoss(margin=0.5)
    patterns = torch.randn(6, 1, 20, 20)

    def loss_of(step):
        kinds = torch.randint(6, (16,))
        others = (kinds + torch.randint(1, 6, (16,))) % 6
        return criterion(*(tower(patterns[k] + 0.4 * torch.randn(16, 1, 20, 20)) for k in (kinds, kinds, others)))

    return torch.optim.Adagrad(tower.parameters(), lr=0.01), loss_of


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(100, 64), nn.ELU(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.ELU(), nn.Linear(64, 100))
        self.register_buffer("mean", torch.zeros(100))

    def forward(self, x):
        raise NotImplementedError("call encoder and decoder")


def submodules_called():
    """An autoencoder whose forward is never called: the script calls encoder and decoder itself."""
    model = Autoencoder()
    basis = torch.randn(5, 100)

    def loss_of(step):
        x = torch.randn(64, 5) @ basis
        model.mean.lerp_(x.mean(0), 0.1)
        code = model.encoder(x - model.mean)
        return F.mse_loss(model.decoder(code) + model.mean, x) + 1e-3 * code.abs().mean()

    return torch.optim.Adam(model.parameters(), lr=1e-3), loss_of


if __name__ == "__main__":
    main(globals())
