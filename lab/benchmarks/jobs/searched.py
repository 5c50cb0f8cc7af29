"""Trains one of several small or large models, for searches of plans: `searched.py moe --scale 8 --device cuda`."""

from __future__ import annotations

import argparse

import torch
from models import Block, Decoder, Residual, ResNet, UNet, Vision, mlp_of
from torch import nn
from torch.nn import functional as F

VOCABULARY = 2000


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
        self.decoder = nn.ModuleList(Block(width, is_crossed=True) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        memory = x = self.embed(ids)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


def make_decoder(width: int, layers: int, *, experts: int = 0, is_adapted: bool = False) -> nn.Module:
    """Returns a GPT, plain, with experts, or frozen and adapted."""
    blocks = [Block(width, mlp=MixtureOfExperts(width, experts) if experts else None) for _ in range(layers)]
    model = Decoder(VOCABULARY, width, blocks)
    if is_adapted:
        model.requires_grad_(False)
        for layer in blocks:
            layer.qkv, layer.out = Adapted(layer.qkv), Adapted(layer.out)
    return model


def make_resnet(width: int, layers: int) -> nn.Module:
    """Returns a residual network whose channels double at each third of its layers."""
    turns = (layers // 3, 2 * layers // 3)
    blocks = [Residual(width << (n * 3 // layers), 2 if n in turns else 1) for n in range(layers)]
    return ResNet(nn.Sequential(nn.Conv2d(3, width, 3, 1, 1), nn.ReLU()), blocks, width << 2, 100)


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
        "gpt": lambda: make_decoder(width, layers),
        "moe": lambda: make_decoder(width, layers, experts=4),
        "lora": lambda: make_decoder(width, layers, is_adapted=True),
        "translator": lambda: Translator(width, layers // 2),
        "vit": lambda: Vision(width, [Block(width, is_causal=False) for _ in range(layers)], 8, 100),
        "resnet": lambda: make_resnet(16 * scale, 3 * max(scale, 2)),
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
