"""Trains a small GPT, ResNet or LSTM, as it is or with changes to what it keeps: planted.py gpt wider retain."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Set

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

STEPS = 8
WORDS = 256

#: Every change, and what it does.
CHANGES = {
    "wider": "the hidden layers of the model are half as wide again",
    "wider-head": "more classes, or a larger vocabulary",
    "deeper": "two more layers",
    "batch": "batches are half as large again",
    "longer": "longer sequences, or larger images",
    "extra-output": "every layer's output is also returned and used in the loss",
    "smooth": "SiLU, which keeps its input, where ReLU keeps only its result",
    "gated": "the hidden layer is multiplied with its own sigmoid",
    "more-dropout": "dropout behind every layer",
    "checkpoint": "layers are recomputed in backward",
    "checkpoint-half": "every other layer is recomputed in backward",
    "autocast": "forward in bfloat16, weights in float32",
    "bf16": "everything in bfloat16",
    "sgd": "plain SGD",
    "momentum": "SGD with momentum",
    "adam": "Adam",
    "amsgrad": "Adam that keeps the largest second moments too",
    "frozen": "the first part of the model is not trained",
    "zeroed": "gradients are set to zero, and not to None",
    "accumulate": "two micro-batches of half the batch",
    "chunked": "the loss is computed and differentiated in four chunks of rows",
    "keep-losses": "every loss is kept in a list",
    "keep-outputs": "every output is kept in a list, detached",
    "log-graph": "a figure of the output is logged with its graph",
    "hold-hidden": "the last layer's output is kept until the next step",
    "retain": "the graph is kept after backward, and the loss until the next step",
    "eval": "an evaluation without gradients at the end of each step",
    "eval-graph": "the same, with gradients",
    "clip": "gradients are clipped to a norm",
    "ema": "an average of the weights is kept",
    "two-losses": "a second loss on the same output",
    "attention": "attention that materializes its scores",
    "mask": "an oversized mask, as a buffer",
    "double-loss": "the loss is computed in float64",
}


class Layer(nn.Module):
    """A layer of the GPT."""

    def __init__(self, width: int, hidden: int, changes: Set[str]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.activate: nn.Module = nn.SiLU() if "smooth" in changes else nn.ReLU(inplace=True)
        self.is_gated, self.is_whole = "gated" in changes, "attention" in changes
        self.dropout = nn.Dropout(0.1) if "more-dropout" in changes else None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        if self.is_whole:
            mixed = (query @ key.transpose(-1, -2) * key.shape[-1] ** -0.5).softmax(-1) @ value
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = self.activate(self.up(self.norm2(x)))
        if self.is_gated:
            hidden = hidden * hidden.sigmoid()
        x = x + self.down(hidden)
        return x if self.dropout is None else self.dropout(x)


class GPT(nn.Module):
    """Words in, one score for each word at each place out, and what the layers put out."""

    def __init__(self, changes: Set[str]) -> None:
        super().__init__()
        width, words = 96 if "wider" in changes else 64, 2 * WORDS if "wider-head" in changes else WORDS
        self.changes = changes
        self.token, self.position = nn.Embedding(WORDS, width), nn.Embedding(128, width)
        layers = 5 if "deeper" in changes else 3
        self.layers = nn.ModuleList(Layer(width, 4 * width, changes) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)
        if "mask" in changes:
            self.register_buffer("mask", torch.ones(512, 512).tril())

    def hidden(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        outputs = []
        for layer in self.layers:
            x = run(layer, x, len(outputs), self.changes)
            outputs.append(x)
        return self.norm(x), outputs

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden, outputs = self.hidden(ids)
        return (hidden if "chunked" in self.changes else self.head(hidden)).flatten(0, 1), outputs


class Unit(nn.Module):
    """A residual unit of the ResNet."""

    def __init__(self, channels_in: int, channels: int, stride: int, changes: Set[str]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.activate: nn.Module = nn.SiLU() if "smooth" in changes else nn.ReLU(inplace=True)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride) if channels_in != channels else nn.Identity()
        self.is_gated = "gated" in changes
        self.dropout = nn.Dropout2d(0.1) if "more-dropout" in changes else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.activate(self.norm1(self.conv1(x)))
        if self.is_gated:
            out = out * out.sigmoid()
        out = self.norm2(self.conv2(out))
        out += self.shortcut(x)
        out = self.activate(out)
        return out if self.dropout is None else self.dropout(out)


class ResNet(nn.Module):
    """Images in, one score for each class out, and what the units put out."""

    def __init__(self, changes: Set[str]) -> None:
        super().__init__()
        widths = (24, 48) if "wider" in changes else (16, 32)
        self.changes = changes
        self.stem = nn.Conv2d(3, widths[0], 3, 1, 1)
        units, before = [], widths[0]
        for stage, width in enumerate(widths):
            for unit in range(3 if "deeper" in changes else 2):
                units.append(Unit(before, width, 2 if stage and not unit else 1, changes))
                before = width
        self.units = nn.Sequential(*units)
        self.head = nn.Linear(before, 1000 if "wider-head" in changes else 10)

    def hidden(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.stem(images)
        outputs = []
        for unit in self.units:
            x = run(unit, x, len(outputs), self.changes)
            outputs.append(x)
        return x.mean((2, 3)), outputs

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden, outputs = self.hidden(images)
        return hidden if "chunked" in self.changes else self.head(hidden), outputs


class WordModel(nn.Module):
    """Words in, one score for each word at each place out, and what the LSTM puts out."""

    def __init__(self, changes: Set[str]) -> None:
        super().__init__()
        width, words = 144 if "wider" in changes else 96, 2 * WORDS if "wider-head" in changes else WORDS
        self.changes = changes
        self.embed = nn.Embedding(WORDS, width)
        self.lstm = nn.LSTM(width, width, 4 if "deeper" in changes else 2, batch_first=True)
        self.dropout = nn.Dropout(0.1) if "more-dropout" in changes else None
        self.head = nn.Linear(width, words)

    def hidden(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = run(lambda x: self.lstm(x)[0], self.embed(ids), 0, self.changes)
        if "gated" in self.changes:
            x = x * x.sigmoid()
        return x if self.dropout is None else self.dropout(x), [x]

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        hidden, outputs = self.hidden(ids)
        return (hidden if "chunked" in self.changes else self.head(hidden)).flatten(0, 1), outputs


def run(layer: Callable[[Tensor], Tensor], x: Tensor, number: int, changes: Set[str]) -> Tensor:
    """Runs a layer, again in backward where that is asked for."""
    if "checkpoint" in changes or ("checkpoint-half" in changes and number % 2):
        again: Tensor = checkpoint(layer, x, use_reentrant=False)
        return again
    return layer(x)


MODELS: dict[str, type[GPT | ResNet | WordModel]] = {"gpt": GPT, "resnet": ResNet, "lstm": WordModel}


def make_batch(model: str, changes: Set[str]) -> tuple[Tensor, Tensor]:
    """Draws a batch of random data: inputs, and what they are to become."""
    examples = 12 if "batch" in changes else 8
    if model == "resnet":
        size = 48 if "longer" in changes else 32
        images = torch.randn(examples, 3, size, size)
        return images.bfloat16() if "bf16" in changes else images, torch.randint(10, (examples,))
    length = 96 if "longer" in changes else 64
    ids = torch.randint(WORDS, (examples, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].flatten()


def loss_of(
    model: GPT | ResNet | WordModel, inputs: Tensor, targets: Tensor, changes: Set[str]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss of a batch, the model's scores, and what its last layer put out."""
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in changes):
        scores, outputs = model(inputs)
        in_full = scores.double() if "double-loss" in changes else scores.float() if "bf16" in changes else scores
        loss = F.cross_entropy(in_full, targets)
        if "extra-output" in changes:
            loss = loss + 1e-3 * sum(output.tanh().square().mean() for output in outputs)
        if "two-losses" in changes:
            loss = loss + 0.1 * scores.logsumexp(-1).square().mean() + 0.1 * scores.softmax(-1).square().sum(-1).mean()
    return loss, scores, outputs[-1]


def differentiate_chunked(model: GPT | ResNet | WordModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Makes the scores of a quarter of the rows at a time, and goes back through each before the next."""
    hidden, _ = model(inputs)
    cut = hidden.detach().requires_grad_()
    total = torch.zeros(())
    for rows, wanted in zip(cut.chunk(4), targets.chunk(4), strict=True):
        loss = F.cross_entropy(model.head(rows), wanted, reduction="sum") / len(targets)
        loss.backward()
        total += loss.detach()
    hidden.backward(cut.grad)
    return total


def make_optimizer(name: str, model: nn.Module, changes: Set[str]) -> torch.optim.Optimizer:
    """Returns the optimizer asked for, or the model's own."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if "sgd" in changes:
        return torch.optim.SGD(parameters, lr=0.01)
    if "momentum" in changes or (name == "resnet" and not changes & {"adam", "amsgrad"}):
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-3, amsgrad="amsgrad" in changes)


def train(name: str, changes: Set[str]) -> None:
    """Trains for a few steps."""
    torch.manual_seed(0)
    model = MODELS[name](changes)
    if "bf16" in changes:
        model = model.bfloat16()
    if "frozen" in changes:
        for child in list(model.children())[:-1]:
            child.requires_grad_(False)
    optimizer = make_optimizer(name, model, changes)
    average = [parameter.detach().clone() for parameter in model.parameters()] if "ema" in changes else []
    kept: list[Tensor] = []
    for _ in range(STEPS):
        inputs, targets = make_batch(name, changes)
        optimizer.zero_grad(set_to_none="zeroed" not in changes)
        if "chunked" in changes:
            loss = differentiate_chunked(model, inputs, targets)
        elif "accumulate" in changes:
            for half, wanted in zip(inputs.chunk(2), targets.chunk(2), strict=True):
                loss, *_ = loss_of(model, half.clone(), wanted.clone(), changes)
                (loss / 2).backward()
        else:
            loss, scores, hidden = loss_of(model, inputs, targets, changes)
            loss.backward(retain_graph="retain" in changes)
            if "keep-outputs" in changes:
                kept.append(scores.detach())
            if "log-graph" in changes:
                kept.append(scores.square().mean())
            del scores
            if "hold-hidden" not in changes:
                del hidden
        if "clip" in changes:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if "keep-losses" in changes:
            kept.append(loss)
        for mean, parameter in zip(average, model.parameters(), strict=False):
            mean.lerp_(parameter.detach(), 0.01)
        if changes & {"eval", "eval-graph"}:
            with torch.set_grad_enabled("eval-graph" in changes):
                seen, *_ = loss_of(model, inputs, targets, changes)
    if changes & {"eval", "eval-graph"}:
        print(f"seen {seen.item():.3f}")
    print(f"loss {loss.item():.3f}")


def main() -> None:
    """Reads the model and its changes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("changes", nargs="*", help=", ".join(CHANGES))
    args = parser.parse_args()
    if unknown := set(args.changes) - CHANGES.keys():
        parser.error(f"there is no change {min(unknown)!r}")
    torch.set_num_threads(1)
    train(args.model, set(args.changes))


if __name__ == "__main__":
    main()
