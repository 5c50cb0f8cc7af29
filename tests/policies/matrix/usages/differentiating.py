"""Ways through autograd: second backwards, gradients of gradients, transforms, copies of graphs, failures."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.policies.matrix.catalog import slow_usage, usage
from tests.policies.matrix.world import World, cross_entropy


@usage
def a_second_backward(world: World) -> None:
    """backward(retain_graph=True), and again over the same graph."""
    model, optimizer = world.ready()
    for batch in world.batches():
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        world.out.trail.append(float(loss.detach()))
    world.out.note_model(model)


@usage
def two_losses(world: World) -> None:
    """Two losses of one forward are differentiated one after the other."""
    model, optimizer = world.ready()
    for x, y in world.batches():
        optimizer.zero_grad()
        logits = model(x)
        F.cross_entropy(logits, y).backward(retain_graph=True)
        logits.pow(2).mean().backward()
        optimizer.step()
    world.out.note_model(model)


@usage
def two_forwards(world: World) -> None:
    """The model is called twice before one backward, as in siamese networks."""
    model, optimizer = world.ready()
    world.train(
        model,
        optimizer,
        2,
        loss_of=lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]) + net(batch[0] * 2).pow(2).mean(),
    )
    world.out.note_model(model)


@usage
def gradient_penalty(world: World) -> None:
    """A penalty on the gradient of the input: create_graph=True."""
    model, optimizer = world.ready()

    def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        logits = net(x)
        (gradient,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return F.cross_entropy(logits, batch[1]) + (gradient.norm(dim=1) - 1).pow(2).mean()

    world.train(model, optimizer, loss_of=loss_of)
    world.out.note_model(model)


@usage
def a_penalty_on_weights(world: World) -> None:
    """The loss has a penalty on the weights in addition to the model's output."""
    model, optimizer = world.ready()
    world.train(
        model,
        optimizer,
        2,
        loss_of=lambda net, batch: cross_entropy(net, batch) + 0.1 * sum(p.pow(2).sum() for p in net.parameters()),
    )
    world.out.note_model(model)


@usage
def gradients_of_gradients(world: World) -> None:
    """loss.backward(create_graph=True), and a second backward through the gradients."""
    model, optimizer = world.ready()
    for batch in world.batches():
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        weights = list(model.parameters())
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        (loss + 0.1 * sum(gradient.pow(2).sum() for gradient in gradients)).backward()
        optimizer.step()
        world.out.trail.append(float(loss.detach()))
    world.out.note_model(model)


@usage
def gradients_by_autograd_grad(world: World) -> None:
    """torch.autograd.grad instead of backward, and gradients set by hand."""
    model, optimizer = world.ready()
    weights = list(model.parameters())
    for batch in world.batches():
        loss = cross_entropy(model, batch)
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient
        optimizer.step()
        world.out.trail.append(float(loss.detach()))
    world.out.note_model(model)


@usage
def functional_call(world: World) -> None:
    """torch.func.functional_call with other weights, and gradients in those."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
    x = world.inputs()
    world.out.facts["zeros answer zero"] = float(torch.func.functional_call(model, zeros, (x,)).abs().max()) == 0.0
    torch.func.functional_call(model, weights, (x,)).pow(2).sum().backward()
    world.out.facts["gradients"] = all(value.grad is not None for value in weights.values())
    world.out.numbers["gradient"] = weights["embed.weight"].grad
    world.train(model, optimizer)
    world.out.note_model(model)


@usage
def per_sample_gradients(world: World) -> None:
    """vmap(grad) over functional_call: a gradient for each sample."""
    model, optimizer = world.ready()

    def loss_of(weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    for x, y in world.batches():
        weights = {name: value.detach() for name, value in model.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(weights, x, y)
        for name, parameter in model.named_parameters():
            parameter.grad = each[name].mean(0)
        optimizer.step()
    world.out.note_model(model)


@usage
def jacobians(world: World) -> None:
    """torch.func.jacrev and jvp of the model."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    x = world.inputs()[0]
    world.out.numbers["jacobian"] = torch.func.jacrev(lambda v: torch.func.functional_call(model, weights, (v,)))(x)
    _, world.out.numbers["tangent"] = torch.func.jvp(
        lambda v: torch.func.functional_call(model, weights, (v,)), (x,), (torch.ones_like(x),)
    )
    world.train(model, optimizer)
    world.out.note_model(model)


@usage
def checkpointing_of_the_jobs_own(world: World) -> None:
    """torch.utils.checkpoint around the model's layers, by the job itself."""
    model, optimizer = world.ready()

    def loss_of(net: Any, batch: Any) -> torch.Tensor:
        x = net.embed(batch[0])
        for layer in net.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(net.head(x), batch[1])

    world.train(model, optimizer, loss_of=loss_of)
    world.train(model, optimizer)
    world.out.note_model(model)


@usage
def reentrant_checkpointing_of_the_jobs_own(world: World) -> None:
    """torch.utils.checkpoint(use_reentrant=True) around the whole model."""
    model, optimizer = world.ready()

    def loss_of(net: Any, batch: Any) -> torch.Tensor:
        logits = checkpoint(net, batch[0].clone().requires_grad_(), use_reentrant=True)
        return F.cross_entropy(logits, batch[1])

    world.train(model, optimizer, 2, loss_of=loss_of)
    world.out.note_model(model)


@usage
def saved_tensors_on_cpu(world: World) -> None:
    """torch.autograd.graph.save_on_cpu and saved_tensors_hooks of the job's own."""
    model, optimizer = world.ready()
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(1)
        return tensor

    def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return cross_entropy(net, batch)

    world.train(model, optimizer, loss_of=loss_of)
    with torch.autograd.graph.save_on_cpu():
        world.train(model, optimizer)
    world.out.facts["packed"] = bool(packed)
    world.out.note_model(model)


@usage
def autocast_of_the_jobs_own(world: World) -> None:
    """The job runs its forward under autocast itself."""
    model, optimizer = world.ready()

    def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(net(batch[0]).float(), batch[1])

    world.train(model, optimizer, 2, loss_of=loss_of)
    world.out.slack = 0.02
    world.out.note_model(model)


@usage
def an_error_in_forward(world: World) -> None:
    """A batch of the wrong size makes forward fail; the job catches that and goes on."""
    model, optimizer = world.ready()
    failed = 0
    for number, (x, y) in enumerate(world.batches(2)):
        optimizer.zero_grad()
        if number % 2:
            try:
                model(x[:, :3])
            except RuntimeError:
                failed += 1
        loss = cross_entropy(model, (x, y))
        loss.backward()
        optimizer.step()
        world.out.trail.append(float(loss.detach()))
    world.out.facts["failed"] = failed > 0
    world.out.note_model(model)


@usage
def an_error_in_backward(world: World) -> None:
    """A hook makes backward fail once; the job drops the gradients and goes on."""
    model, optimizer = world.ready()
    armed = [True]

    def fail(gradient: torch.Tensor) -> None:
        if armed.pop() if armed else False:
            raise ValueError("not this batch")

    model.layers[0].linear.weight.register_hook(fail)
    failed = 0
    for batch in world.batches(2):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        try:
            loss.backward()
        except ValueError:
            failed += 1
            continue
        optimizer.step()
        world.out.trail.append(float(loss.detach()))
    world.out.facts["failed"] = failed
    world.out.facts["moved"] = not torch.equal(world.model().head.weight, model.head.weight)
    # What a loop does by the number of its iteration, it does for a micro-batch under accumulate.
    world.out.trail += [p.detach().clone() for p in model.parameters()]


@usage
def a_step_left_before_backward(world: World) -> None:
    """A batch is left after its forward: its loss is not finite."""
    model, optimizer = world.ready()
    for number, batch in enumerate(world.batches(2)):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        if number == 0:
            continue
        loss.backward()
        optimizer.step()
        world.out.trail.append(float(loss.detach()))
    world.out.facts["moved"] = not torch.equal(world.model().head.weight, model.head.weight)
    # What a loop does by the number of its iteration, it does for a micro-batch under accumulate.
    world.out.trail += [p.detach().clone() for p in model.parameters()]


@usage
def a_step_left_after_backward(world: World) -> None:
    """An update is left out after backward, and the gradients dropped."""
    model, optimizer = world.ready()
    for number, batch in enumerate(world.batches(2)):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        if number == 1:
            continue
        optimizer.step()
        world.out.trail.append(float(loss.detach()))
    world.out.facts["moved"] = not torch.equal(world.model().head.weight, model.head.weight)
    # What a loop does by the number of its iteration, it does for a micro-batch under accumulate.
    world.out.trail += [p.detach().clone() for p in model.parameters()]


@usage
def a_gradient_that_is_not_finite(world: World) -> None:
    """Updates are left out where a gradient is not finite."""
    model, optimizer = world.ready()
    for number, batch in enumerate(world.batches()):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch) * (float("inf") if number == 1 else 1.0)
        loss.backward()
        if all(bool(torch.isfinite(p.grad).all()) for p in model.parameters()):
            optimizer.step()
    world.out.facts["finite"] = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    world.out.note_model(model)


@usage
def an_epoch_left_early(world: World) -> None:
    """The loop is left before the loader is at its end, and begins again."""
    model, optimizer = world.ready()
    for _ in range(2):
        for number, batch in enumerate(world.loader()):
            if number == 1:
                break
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            optimizer.step()
    world.out.trail += [p.detach().clone() for p in model.parameters()]


@usage
def two_networks_in_turn(world: World) -> None:
    """A generator and a discriminator are trained in turn."""
    model, optimizer = world.ready()
    torch.manual_seed(4)
    other = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    second = torch.optim.SGD(other.parameters(), lr=0.05)
    for x, y in world.batches():
        optimizer.zero_grad()
        cross_entropy(model, (other(x).detach(), y)).backward()
        optimizer.step()
        second.zero_grad()
        (-cross_entropy(model, (other(x), y))).backward()
        second.step()
    world.out.note_model(model)
    world.out.note_model(other, "other.")


@slow_usage
def compiled_afterwards(world: World) -> None:
    """torch.compile(model) after the plan is applied."""
    model, optimizer = world.ready()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    world.train(compiled, optimizer, 2)
    world.out.note_model(model)


@slow_usage
def compiled_in_place(world: World) -> None:
    """model.compile() after the plan is applied."""
    model, optimizer = world.ready()
    torch._dynamo.reset()
    model.compile(backend="aot_eager")
    world.train(model, optimizer, 2)
    world.out.note_model(model)


@usage
def distributed_afterwards(world: World) -> None:
    """DistributedDataParallel of one rank around the model after the plan is applied."""
    model, optimizer = world.ready()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        world.train(wrapped, optimizer, 2)
        world.out.note_model(model)
        del wrapped
    finally:
        torch.distributed.destroy_process_group()


@slow_usage
def exported(world: World) -> None:
    """torch.export of the model in evaluation, after training."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    model.eval()
    program = torch.export.export(model, (world.inputs(),))
    world.out.numbers["answer"] = program.module()(world.inputs()).detach()
    model.train()
    world.train(model, optimizer)
    world.out.note_model(model)


@usage
def traced(world: World) -> None:
    """torch.jit.trace of the model in evaluation, after training."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    model.eval()
    with torch.no_grad():
        world.out.numbers["answer"] = torch.jit.trace(model, (world.inputs(),))(world.inputs())
    world.out.note_model(model)
