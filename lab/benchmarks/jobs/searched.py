"""Trains one of several small or large models, for searches of plans: `searched.py moe --scale 8 --device cuda`."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 2000


class Block(nn.Module):
    """A pre-norm transformer layer: self-attention, attention to a memory where there is one, and an MLP."""

    def __init__(self, width: int, *, is_causal: bool, is_crossed: bool = False, experts: int = 0) -> None:
        super().__init__()
        self.heads, self.is_causal = max(width // 32, 1), is_causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        if is_crossed:
            self.norm3 = nn.LayerNorm(width)
            self.query, self.memory, self.crossed = (nn.Linear(width, n * width) for n in (1, 2, 1))
        self.mlp = MixtureOfExperts(width, experts) if experts else mlp_of(width)

    def split(self, x, count):
        batch, length, width = x.shape
        return x.view(batch, length, count, self.heads, width // count // self.heads).permute(2, 0, 3, 1, 4)

    def forward(self, x, memory=None):
        batch, length, width = x.shape
        query, key, value = self.split(self.qkv(self.norm1(x)), 3)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        if memory is not None:
            (query,), (key, value) = self.split(self.query(self.norm3(x)), 1), self.split(self.memory(memory), 2)
            mixed = F.scaled_dot_product_attention(query, key, value)
            x = x + self.crossed(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


def mlp_of(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class MixtureOfExperts(nn.Module):
    """Each expert takes the tokens of one part of the batch: the sizes of routing, without its choice."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(mlp_of(width) for _ in range(count))

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        parts = x.chunk(len(self.experts), 1)
        mixed = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        return torch.cat(mixed, 1) * weights.amax(-1, keepdim=True)


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int, *, experts: int = 0, is_adapted: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, is_causal=True, experts=experts) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        if is_adapted:
            self.requires_grad_(False)
            for layer in self.layers:
                layer.qkv, layer.out = Adapted(layer.qkv), Adapted(layer.out)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Adapted(nn.Module):
    """A frozen Linear with a low-rank update."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Translator(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList(Block(width, is_causal=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(width, is_causal=True, is_crossed=True) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        memory = x = self.embed(ids)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


class Vision(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 8, 8)
        self.layers = nn.ModuleList(Block(width, is_causal=False) for _ in range(layers))
        self.head = nn.Linear(width, 100)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


class Residual(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        before = width // stride
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(before, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        blocks = [
            Residual(width << (n * 3 // layers), 2 if n in (layers // 3, 2 * layers // 3) else 1) for n in range(layers)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(width << 2, 100)

    def forward(self, images):
        return self.head(self.blocks(F.relu(self.stem(images))).mean((2, 3)))


class UNet(nn.Module):
    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        sizes = [width << level for level in range(levels)]
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.ModuleList(self._double(a, b) for a, b in zip([width, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(self._double(a + b, a) for a, b in zip(sizes[-2::-1], sizes[:0:-1], strict=True))
        self.head = nn.Conv2d(width, 100, 1)

    @staticmethod
    def _double(inputs, outputs):
        parts = [nn.Conv2d(inputs, outputs, 3, 1, 1), nn.GroupNorm(8, outputs), nn.SiLU()]
        return nn.Sequential(*parts, nn.Conv2d(outputs, outputs, 3, 1, 1), nn.SiLU())

    def forward(self, images):
        x, skipped = self.stem(images), []
        for layer in self.down:
            x = layer(x)
            skipped.append(x)
            x = F.avg_pool2d(x, 2)
        x = skipped.pop()
        for layer in self.up:
            x = layer(torch.cat([F.interpolate(x, scale_factor=2), skipped.pop()], 1))
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=("gpt", "moe", "lora", "translator", "vit", "resnet", "unet"))
    parser.add_argument("--scale", type=int, default=1, help="of width, layers and batch")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    scale = args.scale
    width, layers, batch, length = 64 * scale, 4 * scale, 4 * scale, 64 * scale
    model = {
        "gpt": lambda: Decoder(width, layers),
        "moe": lambda: Decoder(width, layers, experts=4),
        "lora": lambda: Decoder(width, layers, is_adapted=True),
        "translator": lambda: Translator(width, layers // 2),
        "vit": lambda: Vision(width, layers),
        "resnet": lambda: ResNet(16 * scale, 3 * max(scale, 2)),
        "unet": lambda: UNet(16 * scale, 4),
    }[args.model]().to(args.device)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-4)
    for _ in range(args.steps):
        if args.model in ("vit", "resnet", "unet"):
            inputs = torch.rand(batch, 3, 64, 64, device=args.device)
            shape = (batch, 64, 64) if args.model == "unet" else (batch,)
            targets = torch.randint(100, shape, device=args.device)
        else:
            ids = torch.randint(VOCABULARY, (batch, length + 1), device=args.device)
            inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].flatten()
        outputs = model(inputs)
        loss = F.cross_entropy(outputs.flatten(0, 1) if outputs.dim() == 3 else outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
