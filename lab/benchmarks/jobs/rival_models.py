"""The models that rivals.py trains: three chains of modules, which planners of chains can take, and a U-Net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from models import Block, Residual, UNet
from torch import nn

VOCABULARY, CLASSES, LENGTH = 5000, 100, 128


class Chain(nn.Module):
    """Modules that are called one after the other, in three lists."""

    def __init__(self, first: list[nn.Module], layers: list[nn.Module], last: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.layers, self.last = map(nn.ModuleList, (first, layers, last))

    def links(self) -> list[str]:
        """Names the modules in the order of their calls."""
        lists = ("first", "layers", "last")
        return [f"{each}.{n}" for each in lists for n in range(len(self.get_submodule(each)))]

    def forward(self, x):
        for module in (*self.first, *self.layers, *self.last):
            x = module(x)
        return x


class Embed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)

    def forward(self, ids):
        return self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))


class Transposed(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


class Mean(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return x.mean(self.dims)


def make_gpt() -> Chain:
    width = 256
    layers = [Block(width, width // 64) for _ in range(4)]
    return Chain([Embed(width)], layers, [nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)])


def make_vit() -> Chain:
    width = 192
    first = [nn.Conv2d(3, width, 8, 8), nn.Flatten(2), Transposed()]
    return Chain(
        first, [Block(width, width // 64, is_causal=False) for _ in range(6)], [Mean(1), nn.Linear(width, CLASSES)]
    )


def make_resnet() -> Chain:
    widths = (32, 32, 64, 64, 128, 128)
    layers = [Residual(width, 1 + (width > before)) for before, width in zip((32, *widths), widths, strict=False)]
    return Chain([nn.Conv2d(3, 32, 3, 1, 1), nn.ReLU()], layers, [Mean(2, 3), nn.Linear(128, CLASSES)])


def make_tokens():
    ids = torch.randint(VOCABULARY, (4, LENGTH + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].flatten()


def make_images():
    return torch.rand(8, 3, 64, 64), torch.randint(CLASSES, (8,))


def make_maps():
    return torch.rand(4, 3, 64, 64), torch.randint(CLASSES, (4, 64, 64))


@dataclass(frozen=True)
class Rivalled:
    """A model, its batches, and the prefixes of the modules that are checkpointed as they are."""

    make: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    prefixes: tuple[str, ...] = ("layers",)

    def blocks(self, model: nn.Module) -> list[str]:
        """Names the modules that "every layer checkpointed" means."""
        return [f"{prefix}.{n}" for prefix in self.prefixes for n in range(len(model.get_submodule(prefix)))]


MODELS = {
    "gpt": Rivalled(make_gpt, make_tokens),
    "vit": Rivalled(make_vit, make_images),
    "resnet": Rivalled(make_resnet, make_images),
    "unet": Rivalled(lambda: UNet(16, 4), make_maps, ("down", "up")),
}
