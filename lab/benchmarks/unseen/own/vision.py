"""Classifiers and a detector of random images, in plain torch: vision.py NAME.

Written for this table.
"""

import itertools
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset


class Classifier(nn.Module):
    """A convolutional encoder and a head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, width in ((3, 24), (24, 48), (48, 48)):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU(), nn.AvgPool2d(2)]
        self.encoder = nn.Sequential(*layers, nn.Flatten())
        self.head = nn.Sequential(nn.Linear(48 * 16, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(images))


def averaged() -> None:
    """Two optimizers and a moving average of the weights: an encoder by SGD, a head by AdamW."""
    torch.manual_seed(0)
    model = Classifier()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizers = [
        torch.optim.SGD(model.encoder.parameters(), lr=0.05, momentum=0.9, nesterov=True),
        torch.optim.AdamW(model.head.parameters(), lr=1e-3),
    ]
    data = torch.utils.data.TensorDataset(torch.rand(128, 3, 32, 32), torch.randint(0, 10, (128,)))
    for epoch in range(2):
        model.train()
        for images, labels in torch.utils.data.DataLoader(data, batch_size=16, shuffle=True):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            average.update_parameters(model)
            print(f"epoch {epoch} loss {loss.item():.6f}")
        average.eval()
        with torch.no_grad():
            images, labels = data.tensors
            print(f"epoch {epoch} validation {F.cross_entropy(average(images), labels).item():.6f}")


class Detector(nn.Module):
    """Scores and boxes at each place of a feature map."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 64)
        self.backbone = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
                for a, b in itertools.pairwise(widths)
            )
        )
        self.head = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
        self.scores, self.boxes = nn.Conv2d(64, 1, 1), nn.Conv2d(64, 4, 1)

    def forward(self, images: torch.Tensor, targets: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.head(self.backbone(images))
        scores, boxes = self.scores(features).flatten(1), self.boxes(features).flatten(2).transpose(1, 2)
        rows, columns = features.shape[-2:]
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        centres = torch.stack([x.flatten(), y.flatten()], 1).float() * 8 + 4
        score_loss, box_loss = scores.new_zeros(()), scores.new_zeros(())
        for number, target in enumerate(targets):
            middle = (target[:, :2] + target[:, 2:]) / 2
            nearest = torch.cdist(centres, middle).argmin(0)
            wanted = torch.zeros_like(scores[number]).index_fill(0, nearest, 1.0)
            score_loss = score_loss + F.binary_cross_entropy_with_logits(scores[number], wanted)
            found = scores[number].detach().sigmoid() > 0.5
            positive = torch.cat([found.nonzero()[:50, 0], nearest])
            offsets = target[torch.cdist(centres[positive], middle).argmin(1)] / 64
            box_loss = box_loss + F.smooth_l1_loss(boxes[number][positive], offsets)
        return score_loss / len(targets), box_loss / len(targets)


def detection() -> None:
    """A small detector: as many boxes an image as it has, anchors matched to them, images of several sizes."""
    torch.manual_seed(0)
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for step in range(14):
        height, width = (96, 128) if step % 3 else (128, 128)
        images = torch.rand(4, 3, height, width)
        targets = []
        for _ in images:
            corners = torch.rand(int(torch.randint(1, 9, ())), 2) * 64
            targets.append(torch.cat([corners, corners + 8 + 40 * torch.rand_like(corners)], 1))
        losses = model(images, targets)
        loss = sum(losses, torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        print(f"step {step} loss {loss.item():.6f}")


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Random images."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 32, 32, generator=generator), index % 10


def scaled() -> None:
    """Autocast with a gradient scaler, loader workers, and batches of validation four times larger."""
    torch.manual_seed(0)
    blocks = []
    for before, width in ((3, 16), (16, 32), (32, 32)):
        blocks.append(nn.Sequential(nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()))
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    training = DataLoader(Images(96), batch_size=8, num_workers=2, shuffle=True)
    validation = DataLoader(Images(64), batch_size=32, num_workers=1)
    for epoch in range(2):
        model.train()
        for images, labels in training:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            print(f"epoch {epoch} loss {loss.item():.6f}")
        model.eval()
        with torch.no_grad():
            losses = [F.cross_entropy(model(images), labels) for images, labels in validation]
        print(f"epoch {epoch} validation {torch.stack(losses).mean().item():.6f}")


WIDTH, PATCH, CLASSES = 64, 4, 10


class Block(nn.Module):
    """Attention and a perceptron; either may be left out in training."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = drop

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return values
        return values * torch.bernoulli(values.new_full((len(values), 1, 1), 1 - self.drop)) / (1 - self.drop)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norm1(tokens)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        tokens = tokens + self.keep(self.projection(mixed))
        return tokens + self.keep(self.mlp(self.norm2(tokens)))


class Transformer(nn.Module):
    """Patches, a class token, blocks."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 65, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block(0.1 * number / depth) for number in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens)[:, 0])


def vision_transformer() -> None:
    """A vision transformer with stochastic depth, mixup, warm-up and clipping."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5)
    data = torch.utils.data.TensorDataset(torch.rand(160, 3, 32, 32), torch.randint(0, CLASSES, (160,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, drop_last=True)
    for step, (images, labels) in enumerate(loader):
        share, order = torch.distributions.Beta(0.8, 0.8).sample(), torch.randperm(len(images))
        targets = F.one_hot(labels, CLASSES).float()
        mixed = share * images + (1 - share) * images[order]
        loss = F.cross_entropy(model(mixed), share * targets + (1 - share) * targets[order])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
