"""Trains one of twelve small models under torch.compile: python compiled.py NAME [--eager | --share R | --plan P]."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch._functorch.config
import torch.nn.functional as functional
from models import Block, mlp_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memprof

CLASSES, WIDTH = 500, 96


class Mixture(nn.Module):
    """Four experts, of which each token takes the best two by weight."""

    def __init__(self, width: int) -> None:
        """Creates the experts and their gate."""
        super().__init__()
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(mlp_of(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Sums the chosen experts' outputs."""
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        share = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights)
        parts: Tensor = sum(share[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        return parts


class Transformer(nn.Module):
    """Embeds tokens or patches, and classifies each position."""

    def __init__(self, inputs: nn.Module, layers: list[nn.Module]) -> None:
        """Puts layers behind an embedding."""
        super().__init__()
        self.inputs = inputs
        self.positions = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.between: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)

    def forward(self, given: Tensor) -> Tensor:
        """Returns scores."""
        x = self.inputs(given)
        if x.dim() == 4:
            x = x.flatten(2).transpose(1, 2)
        x = x + self.positions(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = self.between(layer, x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class Residual(nn.Module):
    """Two convolutions beside a shortcut; with a time, scaled by its embedding."""

    def __init__(
        self, before: int, after: int, stride: int = 1, norm: Callable[[int], nn.Module] = nn.BatchNorm2d
    ) -> None:
        """Creates it."""
        super().__init__()
        self.one, self.two = nn.Conv2d(before, after, 3, stride, 1), nn.Conv2d(after, after, 3, 1, 1)
        self.norms = nn.ModuleList([norm(after), norm(after)])
        self.shortcut = nn.Conv2d(before, after, 1, stride)
        self.scale = nn.Linear(32, after)

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        """Returns the sum."""
        inner = functional.silu(self.norms[0](self.one(x)))
        if time is not None:
            inner = inner * (1 + self.scale(time)[:, :, None, None])
        return functional.silu(self.norms[1](self.two(inner)) + self.shortcut(x))


class Resnet(nn.Module):
    """Four residual blocks, then classes."""

    def __init__(self) -> None:
        """Creates them."""
        super().__init__()
        self.blocks = nn.Sequential(Residual(3, 32), Residual(32, 64, 2), Residual(64, 64), Residual(64, 128, 2))
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Returns scores."""
        scores: Tensor = self.head(self.blocks(images).mean((2, 3)))
        return scores


class Unet(nn.Module):
    """Two levels down and up; with times, the denoiser of a diffusion model, which attends at the bottom."""

    def __init__(self, *, is_denoiser: bool) -> None:
        """Creates it."""
        super().__init__()
        norm = (lambda n: nn.GroupNorm(8, n)) if is_denoiser else nn.BatchNorm2d
        self.down = nn.ModuleList([Residual(3, 16, 1, norm), Residual(16, 32, 2, norm)])
        self.bottom = Residual(32, 64, 2, norm)
        self.attention = Block(64, 4, is_causal=False, dropout=0.0) if is_denoiser else None
        self.up = nn.ModuleList([Residual(96, 32, 1, norm), Residual(48, 16, 1, norm)])
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, images: Tensor, time: Tensor | None = None) -> Tensor:
        """Returns an image."""
        kept = []
        for block in self.down:
            images = block(images, time)
            kept.append(images)
        x = self.bottom(images, time)
        if self.attention is not None:
            flat = self.attention(x.flatten(2).transpose(1, 2))
            x = flat.transpose(1, 2).reshape(x.shape)
        for block in self.up:
            x = block(torch.cat([functional.interpolate(x, scale_factor=2), kept.pop()], 1), time)
        image: Tensor = self.head(x)
        return image


class Scan(nn.Module):
    """A selective state space: gates by token, one recurrent step for each of them."""

    def __init__(self) -> None:
        """Creates two layers."""
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns scores."""
        x = self.embed(tokens)
        for gate in self.gates:
            decay, given, shown = gate(x).chunk(3, -1)
            state, states = torch.zeros_like(x[:, 0]), []
            for place in range(x.shape[1]):
                state = decay[:, place].sigmoid() * state + given[:, place]
                states.append(state * shown[:, place].tanh())
            x = x + torch.stack(states, 1)
        scores: Tensor = self.head(x)
        return scores


class Recurrent(nn.Module):
    """An LSTM, on which the compiler breaks the graph."""

    def __init__(self) -> None:
        """Creates it."""
        super().__init__()
        self.embed, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns scores."""
        scores: Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return scores


def tokens(step: int, *, varied: bool = False) -> tuple[Tensor, ...]:
    """Returns sequences and the classes of their positions."""
    length = 128 - 24 * (step % 3) if varied else 128
    return torch.randint(CLASSES, (8, length)), torch.randint(CLASSES, (8, length))


def images(_step: int) -> tuple[Tensor, ...]:
    """Returns images and their classes."""
    return torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


def noisy(_step: int) -> tuple[Tensor, ...]:
    """Returns images and the images wanted."""
    return torch.randn(16, 3, 32, 32), torch.randn(16, 3, 32, 32)


def break_graph(layer: nn.Module, x: Tensor) -> Tensor:
    """Calls a layer in a graph of its own."""
    torch._dynamo.graph_break()
    called: Tensor = layer(x)
    return called


def run_again(layer: nn.Module, x: Tensor) -> Tensor:
    """Calls a layer that is computed again in backward."""
    called: Tensor = checkpoint(layer, x, use_reentrant=False)
    return called


def model_named(name: str) -> tuple[nn.Module, Callable[[int], tuple[Tensor, ...]]]:
    """Returns a model, and what makes its batches."""
    if name in ("resnet", "unet", "diffusion"):
        return (Resnet(), images) if name == "resnet" else (Unet(is_denoiser=name == "diffusion"), noisy)
    if name in ("scan", "lstm"):
        return (Scan() if name == "scan" else Recurrent()), tokens
    inputs = nn.Conv2d(3, WIDTH, 4, 4) if name == "vit" else nn.Embedding(CLASSES, WIDTH)
    settings = {"is_causal": name not in ("vit", "bert"), "dropout": 0.1 if name == "bert" else 0.0}
    layers = [Block(WIDTH, 4, mlp=Mixture(WIDTH) if name == "moe" else None, **settings) for _ in range(3)]
    model = Transformer(inputs, layers)
    if name == "vit":
        return model, images
    if name in ("breaks", "checkpointed"):
        model.between = break_graph if name == "breaks" else run_again
    return model, (lambda step: tokens(step, varied=True)) if name == "dynamic" else tokens


def loss_of(name: str, model: nn.Module, given: Tensor, wanted: Tensor) -> Tensor:
    """Returns a batch's loss."""
    if name in ("unet", "diffusion"):
        times = (torch.randn(len(given), 32),) if name == "diffusion" else ()
        return functional.mse_loss(model(given, *times), wanted)
    scores: Tensor = model(given)
    if name == "vit":
        scores = scores.mean(1)
    return functional.cross_entropy(scores.flatten(0, -2), wanted.flatten())


def compiled_under(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, share: float | None = None, plan: str | None = None
) -> nn.Module:
    """Returns the model, to be compiled at its first call: under a plan, or under torch's budget, which stays set."""
    if plan is not None:
        memprof.apply(plan, model, optimizer)
        return model
    if share is not None:
        torch._functorch.config.activation_memory_budget = share
    compiled: nn.Module = torch.compile(model)
    return compiled


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--share", type=float, help="torch's budget for what its compiler saves, of all of it")
    parser.add_argument("--plan", help="a plan of memprof's, for the job as it is without the compiler")
    args = parser.parse_args()
    torch.manual_seed(0)
    model, batch = model_named(args.name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = model if args.eager else compiled_under(model, optimizer, share=args.share, plan=args.plan)
    for step in range(args.steps):
        loss = loss_of(args.name, compiled, *batch(step))  # type: ignore[arg-type]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item()}")


if __name__ == "__main__":
    main()
