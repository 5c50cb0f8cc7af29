"""Changes to a model in the middle: frozen, cast, taken apart, its parameters made by something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import is_parametrized

from tests.policies.matrix.catalog import usage
from tests.policies.matrix.world import Net, World


def _train_and_thaw(world: World, model: Net, optimizer: torch.optim.Optimizer) -> None:
    """Trains while layers are frozen, and then with them, and notes which of them moved."""
    before = [p.detach().clone() for p in model.layers.parameters()]
    world.train(model, optimizer)
    world.out.facts["frozen stay"] = all(
        torch.equal(a, b) for a, b in zip(before, model.layers.parameters(), strict=True)
    )
    model.layers.requires_grad_(True)
    world.train(model, optimizer)
    world.out.facts["thawed move"] = not any(
        torch.equal(a, b) for a, b in zip(before, model.layers.parameters(), strict=True)
    )
    world.out.note_model(model)


@usage
def freezing_and_thawing(world: World) -> None:
    """Layers are frozen after an epoch and thawed after another."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    optimizer.zero_grad()
    model.layers.requires_grad_(False)
    _train_and_thaw(world, model, optimizer)


@usage
def thawing_what_was_frozen(world: World) -> None:
    """Layers are frozen before the plan is applied, and thawed in the middle."""
    model = world.model()
    model.layers.requires_grad_(False)
    optimizer = world.sgd(model)
    world.apply(model, optimizer)
    _train_and_thaw(world, model, optimizer)


@usage
def an_adapter_on_a_frozen_model(world: World) -> None:
    """All but the head is frozen."""
    model = world.model()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)
    world.apply(model, optimizer)
    world.train(model, optimizer, 2)
    world.out.note_model(model)


@usage
def shared_weights(world: World) -> None:
    """Two layers have one weight."""
    model, optimizer = world.ready(tied=True)
    world.train(model, optimizer, 2)
    world.out.facts["still shared"] = model.layers[0].linear.weight is model.layers[1].linear.weight
    world.out.facts["keys"] = list(model.state_dict())
    world.out.note_model(model)


@usage
def an_unused_layer(world: World) -> None:
    """A layer is never called and has no gradient."""
    model, optimizer = world.ready(unused=True)
    world.train(model, optimizer, 2)
    optimizer.zero_grad()
    world.out.facts["no gradient"] = model.spare.weight.grad is None
    world.out.note_model(model)


@usage
def weight_norm_before(world: World) -> None:
    """weight_norm by parametrization, before the plan is applied."""
    model = world.model()
    parametrizations.weight_norm(model.layers[0].linear)
    optimizer = world.sgd(model)
    world.apply(model, optimizer)
    world.train(model, optimizer, 2)
    world.out.facts["keys"] = list(model.state_dict())
    world.out.note_model(model)


@usage
def weight_norm_in_the_middle(world: World) -> None:
    """weight_norm by parametrization after an epoch, and removed after another."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    parametrizations.weight_norm(model.head)
    optimizer.add_param_group({"params": list(model.head.parametrizations.parameters())})
    world.train(model, optimizer)
    nn.utils.parametrize.remove_parametrizations(model.head, "weight")
    world.out.facts["parametrized"] = is_parametrized(model)
    world.out.note_model(model)
    world.out.numbers["answer"] = model(world.inputs()).detach()


@usage
def spectral_norm(world: World) -> None:
    """spectral_norm by parametrization, whose vectors move in each forward of training."""
    model = world.model()
    parametrizations.spectral_norm(model.layers[1].linear)
    optimizer = world.sgd(model)
    world.apply(model, optimizer)
    before = model.layers[1].linear.parametrizations.weight.original.detach().clone()
    world.train(model, optimizer, 2)
    world.out.facts["moved"] = not torch.equal(before, model.layers[1].linear.parametrizations.weight.original)
    # The vectors move with every call, of which accumulate makes more.
    world.out.trail += [p.detach().clone() for p in model.parameters()]


@usage
def pruning(world: World) -> None:
    """torch.nn.utils.prune, whose masks are applied before each forward."""
    model = world.model()
    prune.l1_unstructured(model.layers[0].linear, "weight", amount=0.5)
    optimizer = world.sgd(model)
    world.apply(model, optimizer)
    world.train(model, optimizer, 2)
    world.out.note_model(model)


@usage
def a_new_head(world: World) -> None:
    """The head is replaced after an epoch, and its parameters given to the optimizer."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    torch.manual_seed(3)
    model.head = nn.Linear(model.head.in_features, model.head.out_features)
    optimizer.add_param_group({"params": list(model.head.parameters())})
    before = model.head.weight.detach().clone()
    world.train(model, optimizer)
    world.out.facts["moved"] = not torch.equal(before, model.head.weight)
    world.out.note_model(model)


@usage
def cast_to_double_in_the_middle(world: World) -> None:
    """model.to(float64) after an epoch."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    optimizer.zero_grad()
    model.double()
    other = world.sgd(model)
    world.train(model, other, loss_of=_in(torch.float64))
    world.out.facts["types"] = sorted({str(p.dtype) for p in model.parameters()})
    world.out.note_model(model)


@usage
def cast_to_bfloat16_in_the_middle(world: World) -> None:
    """model.to(bfloat16) for evaluation after an epoch, and back to float32."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    optimizer.zero_grad()
    model.to(torch.bfloat16)
    with torch.no_grad():
        world.out.numbers["answer"] = model(world.inputs().to(torch.bfloat16)).float()
    model.float()
    world.train(model, optimizer)
    world.out.trail.append(sorted({str(p.dtype) for p in model.parameters()}))


@usage
def weights_clamped_by_hand(world: World) -> None:
    """Weights are clamped under no_grad after each step."""
    model, optimizer = world.ready()
    for _ in range(2):
        world.train(model, optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
    world.out.facts["clamped"] = all(float(p.detach().abs().max()) <= 0.2 for p in model.parameters())
    world.out.note_model(model)


@usage
def weights_initialised_late(world: World) -> None:
    """model.apply(init) after the plan is applied."""
    model, optimizer = world.ready()
    torch.manual_seed(5)
    model.apply(lambda module: nn.init.normal_(module.weight, 0, 0.1) if isinstance(module, nn.Linear) else None)
    world.train(model, optimizer, 2)
    world.out.note_model(model)


@usage
def data_replaced_by_hand(world: World) -> None:
    """Parameters are given other data through .data."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    world.train(model, optimizer)
    world.out.note_model(model)


def _in(dtype: torch.dtype) -> Any:
    def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(net(batch[0].to(dtype)).to(dtype), batch[1])

    return loss_of
