"""The environment of a usage: a small model, its data, and a plan to apply, or none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[torch.Tensor, torch.Tensor]

FEATURES, WIDTH, CLASSES, SAMPLES, BATCH = 8, 16, 5, 24, 8


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what it is given, and more."""
        return x + F.gelu(self.linear(self.norm(x)))


class Net(nn.Module):
    """A model of two layers and a head, with another method in addition to its forward."""

    def __init__(self, *, tied: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.ones(WIDTH))
        if tied:
            self.layers[1].linear.weight = self.layers[0].linear.weight
        if unused:
            self.spare = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, gain: float = 1.0, *, flat: bool = True) -> torch.Tensor:
        """Returns logits."""
        return self.head(self.encode(x) * gain)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Returns features."""
        x = self.embed(x) * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass
class Outcome:
    """The results of a usage, compared between the plain run and one under a plan.

    Attributes:
        facts: Equal under every plan: answers, names, whether something holds.
        numbers: Equal to the bit under a plan that leaves numbers alone, within a tolerance under others.
        slack: Added to the tolerance, where the job itself rounds.
        trail: Losses and counts of every iteration: compared where a plan leaves numbers alone.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    slack: float = 0.0
    trail: list[Any] = field(default_factory=list)

    def note_model(self, model: nn.Module, prefix: str = "") -> None:
        """Notes the values of a model's parameters and buffers."""
        for name, value in model.state_dict().items():
            self.numbers[f"{prefix}{name}"] = value.detach().clone()


class World:
    """The environment of a usage.

    Attributes:
        out: Its results.
    """

    def __init__(self, apply: Callable[..., Any] | None = None) -> None:
        """Takes what applies the plan to a model and its optimizers; None for a plain run."""
        self.out = Outcome()
        self._apply = apply

    def model(self, **settings: bool) -> Net:
        """Makes a model from the same seed each time."""
        torch.manual_seed(0)
        return Net(**settings)

    def apply(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
        """Applies the plan, once the model and the optimizers are made."""
        if self._apply is not None:
            self._apply(model, list(optimizers))

    def loader(self, samples: int = SAMPLES, batch: int = BATCH) -> DataLoader[Any]:
        """Returns a loader of the same batches each time."""
        draw = torch.Generator().manual_seed(1)
        inputs = torch.randn(samples, FEATURES, generator=draw)
        targets = torch.randint(0, CLASSES, (samples,), generator=draw)
        return DataLoader(TensorDataset(inputs, targets), batch_size=batch)

    def inputs(self) -> torch.Tensor:
        """Returns a batch to evaluate."""
        return torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(2))

    def sgd(self, model: nn.Module, **settings: Any) -> torch.optim.SGD:
        """Makes an optimizer with state, whose updates follow the gradient."""
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **settings)

    def ready(self, **settings: bool) -> tuple[Net, torch.optim.SGD]:
        """Returns a model and an optimizer to which the plan is applied."""
        model = self.model(**settings)
        optimizer = self.sgd(model)
        self.apply(model, optimizer)
        return model, optimizer

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        epochs: int = 1,
        *,
        before_step: Callable[[], Any] = lambda: None,
        loss_of: Callable[[nn.Module, Batch], torch.Tensor] | None = None,
    ) -> None:
        """Trains as most loops do."""
        for batch in self.batches(epochs):
            optimizer.zero_grad()
            loss = (loss_of or cross_entropy)(model, batch)
            loss.backward()
            before_step()
            optimizer.step()
            self.out.trail.append(float(loss.detach()))

    def batches(self, epochs: int = 1) -> Iterator[Batch]:
        """Yields the batches of some epochs."""
        loader = self.loader()
        for batch in itertools.chain.from_iterable(loader for _ in range(epochs)):
            yield tuple(batch)  # type: ignore[misc]


def cross_entropy(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns the mean loss of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])
