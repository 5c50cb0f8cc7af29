"""Looking at a model: its type, its signature, its hooks, its answers in evaluation."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from tests.policies.matrix.catalog import usage
from tests.policies.matrix.world import Block, Net, World


@usage
def signature_of_forward(world: World) -> None:
    """inspect.signature(model.forward), by which Trainers choose the columns of a batch."""
    model, _ = world.ready()
    world.out.facts["signature"] = str(inspect.signature(model.forward))
    world.out.facts["layer's"] = str(inspect.signature(model.layers[0].forward))
    world.out.facts["linear's"] = str(inspect.signature(model.layers[0].linear.forward))
    world.out.facts["arguments"] = inspect.getfullargspec(model.forward).args
    world.out.facts["name"] = model.forward.__name__


@usage
def types_and_names(world: World) -> None:
    """isinstance, type(), repr(), named_modules(), named_parameters(), and that parameters stay the same objects."""
    model = world.model()
    optimizer = world.sgd(model)
    before = list(model.parameters())
    world.apply(model, optimizer)
    world.out.facts["instances"] = [isinstance(model, Net), isinstance(model.layers[0], Block)]
    world.out.facts["types"] = [type(module).__name__ for module in model.modules()]
    world.out.facts["modules"] = [name for name, _ in model.named_modules()]
    world.out.facts["parameters"] = [name for name, _ in model.named_parameters()]
    world.out.facts["buffers"] = [name for name, _ in model.named_buffers()]
    world.out.facts["text"] = repr(model)
    world.out.facts["same objects"] = all(a is b for a, b in zip(before, model.parameters(), strict=True))
    world.out.facts["shapes"] = [tuple(p.shape) for p in model.parameters()]
    world.out.facts["trained"] = [p.requires_grad for p in model.parameters()]
    world.train(model, optimizer)
    world.out.facts["same objects later"] = all(a is b for a, b in zip(before, model.parameters(), strict=True))


@usage
def forward_hooks(world: World) -> None:
    """The job's own forward hooks and pre-hooks: they look, and they change what goes in and out."""
    model, optimizer = world.ready()
    seen: list[str] = []
    model.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model.register_forward_hook(lambda _, args, output: seen.append(str(tuple(output.shape[1:]))))
    model.layers[0].register_forward_hook(lambda _, args, output: output * 0.5)
    handle = model.head.register_forward_hook(lambda *_: seen.append("head"))
    world.train(model, optimizer)
    handle.remove()
    world.train(model, optimizer)
    world.out.facts["seen"] = sorted(set(seen))
    world.out.trail.append(seen)
    world.out.note_model(model)


@usage
def features_by_a_hook(world: World) -> None:
    """A forward hook takes features out of a layer, and they become part of the loss."""
    model, optimizer = world.ready()
    features: dict[str, torch.Tensor] = {}
    model.layers[1].register_forward_hook(lambda _, args, output: features.update(last=output))

    def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
        logits = net(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]) + features["last"].pow(2).mean()

    world.train(model, optimizer, 2, loss_of=loss_of)
    world.out.note_model(model)


@usage
def backward_hooks(world: World) -> None:
    """The job's own full backward hooks and pre-hooks on the model and on layers."""
    model, optimizer = world.ready()
    seen: list[str] = []
    model.layers[0].register_full_backward_hook(lambda _, into, out: seen.append(f"layer {into[0].shape[1]}"))
    model.layers[1].register_full_backward_pre_hook(lambda _, out: (out[0] * 0.5,))
    model.register_full_backward_pre_hook(lambda _, out: seen.append(f"model {out[0].shape[1]}"))
    world.train(model, optimizer, 2)
    world.out.facts["seen"] = sorted(set(seen))
    world.out.trail.append(seen)
    world.out.note_model(model)


@usage
def tensor_hooks(world: World) -> None:
    """Hooks on an output and on parameters change gradients on their way."""
    model, optimizer = world.ready()
    model.head.weight.register_hook(lambda gradient: gradient * 0.5)
    seen: list[int] = []
    model.embed.weight.register_hook(lambda gradient: seen.append(gradient.dim()))

    def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
        logits = net(batch[0])
        logits.register_hook(lambda gradient: gradient * 2)
        return nn.functional.cross_entropy(logits, batch[1])

    world.train(model, optimizer, 2, loss_of=loss_of)
    world.out.facts["seen"] = sorted(set(seen))
    world.out.note_model(model)


@usage
def hooks_after_a_gradient(world: World) -> None:
    """register_post_accumulate_grad_hook of the job's own, after the plan is applied."""
    model, optimizer = world.ready()
    seen: list[bool] = []
    model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is not None))
    world.train(model, optimizer)
    world.out.facts["seen"] = sorted(set(seen))
    world.out.note_model(model)


@usage
def hooks_after_a_gradient_made_before(world: World) -> None:
    """register_post_accumulate_grad_hook of the job's own, made before the plan is applied: it scales a gradient."""
    model = world.model()
    optimizer = world.sgd(model)

    def halve(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)

    model.head.weight.register_post_accumulate_grad_hook(halve)
    world.apply(model, optimizer)
    world.train(model, optimizer)
    world.out.note_model(model)


@usage
def evaluation_without_gradients(world: World) -> None:
    """Validation under no_grad after each epoch, in eval() and then train() again."""
    model, optimizer = world.ready()
    for epoch in range(2):
        world.train(model, optimizer)
        model.eval()
        with torch.no_grad():
            world.out.numbers[f"answer {epoch}"] = model(world.inputs())
        world.out.facts[f"graph {epoch}"] = world.out.numbers[f"answer {epoch}"].requires_grad
        model.train()
    world.out.note_model(model)


@usage
def evaluation_in_inference_mode(world: World) -> None:
    """Validation under inference_mode before the first step and after an epoch."""
    model, optimizer = world.ready()
    for epoch in range(2):
        with torch.inference_mode():
            world.out.numbers[f"answer {epoch}"] = model(world.inputs()).clone()
        world.train(model, optimizer)
    world.out.note_model(model)


@usage
def training_in_eval_mode(world: World) -> None:
    """Fine-tuning with the model in eval(), as with frozen statistics."""
    model, optimizer = world.ready()
    model.eval()
    world.train(model, optimizer, 2)
    world.out.note_model(model)


@usage
def a_method_beside_forward(world: World) -> None:
    """The model's other methods are called, and its layers one by one."""
    model, optimizer = world.ready()

    def loss_of(net: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(net.head(net.encode(batch[0])), batch[1])

    world.train(model, optimizer, loss_of=loss_of)
    world.train(model, optimizer)
    world.out.numbers["features"] = model.encode(world.inputs()).detach()
    world.out.note_model(model)


@usage
def keyword_arguments(world: World) -> None:
    """forward is called by keywords."""
    model, optimizer = world.ready()
    world.train(
        model,
        optimizer,
        2,
        loss_of=lambda net, batch: nn.functional.cross_entropy(net(gain=2.0, x=batch[0], flat=False), batch[1]),
    )
    world.out.note_model(model)


@usage
def attributes_of_the_model(world: World) -> None:
    """Attributes are set and read on the model; dir() and vars() name what they did."""
    model, optimizer = world.ready()
    model.best = 3
    model.layers[0].note = "kept"
    world.train(model, optimizer)
    world.out.facts["attributes"] = [model.best, model.layers[0].note, hasattr(model, "encode")]
    world.out.facts["members"] = sorted({name for name in dir(model) if not name.startswith("_")})
