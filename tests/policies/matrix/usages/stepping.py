"""What a loop does between backward and the next batch: clipping, scaling, scheduling, several optimizers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.policies.matrix.catalog import usage
from tests.policies.matrix.world import World, cross_entropy


@usage
def plain_training(world: World) -> None:
    """A plain loop of two epochs."""
    model, optimizer = world.ready()
    world.train(model, optimizer, 2)
    world.out.note_model(model)


@usage
def training_with_adamw(world: World) -> None:
    """A plain loop with AdamW."""
    model = world.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    world.apply(model, optimizer)
    world.train(model, optimizer, 2)
    world.out.facts["state"] = [sorted(map(str, one)) for one in optimizer.state_dict()["state"].values()]
    world.out.trail += [p.detach().clone() for p in model.parameters()]


@usage
def clipping_by_norm(world: World) -> None:
    """clip_grad_norm_ before each update."""
    model, optimizer = world.ready()
    world.train(model, optimizer, 2, before_step=lambda: clip_grad_norm_(model.parameters(), 0.05))
    world.out.note_model(model)


@usage
def clipping_by_value(world: World) -> None:
    """clip_grad_value_ before each update."""
    model, optimizer = world.ready()
    world.train(model, optimizer, 2, before_step=lambda: clip_grad_value_(model.parameters(), 0.01))
    world.out.note_model(model)


@usage
def clipping_by_hand(world: World) -> None:
    """Gradients are clipped by the job's own code."""
    model, optimizer = world.ready()

    def clip() -> None:
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.05 / (norm + 1e-6))

    world.train(model, optimizer, before_step=clip)
    world.out.note_model(model)


@usage
def gradients_read(world: World) -> None:
    """p.grad is read after backward, to log its norm."""
    model, optimizer = world.ready()
    norms: list[float] = []
    world.train(
        model, optimizer, before_step=lambda: norms.append(sum(float(p.grad.norm()) for p in model.parameters()))
    )
    world.out.facts["some gradient"] = all(norm > 0 for norm in norms)
    world.out.trail.append(norms)
    world.out.note_model(model)


@usage
def gradients_looked_for(world: World) -> None:
    """Parameters without a gradient are looked for after backward, as jobs check for unused ones."""
    model, optimizer = world.ready()
    missing: list[str] = []
    world.train(
        model,
        optimizer,
        before_step=lambda: missing.extend(name for name, p in model.named_parameters() if p.grad is None),
    )
    world.out.facts["missing"] = missing
    world.out.note_model(model)


@usage
def gradients_kept_at_zero(world: World) -> None:
    """zero_grad(set_to_none=False), of the optimizer and of the model."""
    model, optimizer = world.ready()
    for number, batch in enumerate(world.batches(2)):
        (model if number % 2 else optimizer).zero_grad(set_to_none=False)
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        world.out.trail.append(float(loss.detach()))
    world.out.note_model(model)


@usage
def zero_grad_after_the_step(world: World) -> None:
    """zero_grad() after step(), not before backward."""
    model, optimizer = world.ready()
    for batch in world.batches(2):
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        world.out.trail.append(float(loss.detach()))
    world.out.note_model(model)


@usage
def gradients_never_reset(world: World) -> None:
    """zero_grad() is never called: gradients add up from step to step."""
    model, optimizer = world.ready()
    for batch in world.batches():
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        world.out.trail.append(float(loss.detach()))
    world.out.note_model(model)


@usage
def gradient_scaler(world: World) -> None:
    """torch.amp.GradScaler around backward and step."""
    model, optimizer = world.ready()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for batch in world.batches(2):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        world.out.trail.append(float(loss.detach()))
    world.out.facts["scale"] = scaler.get_scale()
    world.out.note_model(model)


@usage
def gradient_scaler_with_clipping(world: World) -> None:
    """GradScaler under autocast, unscale_ and clip_grad_norm_."""
    model, optimizer = world.ready()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for batch in world.batches(2):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        world.out.trail.append(float(loss.detach()))
    world.out.note_model(model)


@usage
def scheduler_of_steps(world: World) -> None:
    """An LR scheduler that steps with every batch."""
    model, optimizer = world.ready()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    for batch in world.batches(2):
        optimizer.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        world.out.trail.append(float(loss.detach()))
    world.out.facts["rate"] = round(scheduler.get_last_lr()[0], 9)
    world.out.note_model(model)


@usage
def scheduler_of_epochs(world: World) -> None:
    """An LR scheduler made before the plan is applied that steps with every epoch."""
    model = world.model()
    optimizer = world.sgd(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    world.apply(model, optimizer)
    for _ in range(3):
        world.train(model, optimizer)
        scheduler.step()
    world.out.facts["rate"] = round(scheduler.get_last_lr()[0], 9)
    world.out.note_model(model)


@usage
def rate_set_by_hand(world: World) -> None:
    """The learning rate is set in param_groups before each update, between backward and step()."""
    model, optimizer = world.ready()
    rates = itertools.count(1)

    def warm_up() -> None:
        optimizer.param_groups[0]["lr"] = 0.001 * next(rates)

    world.train(model, optimizer, before_step=warm_up)
    world.out.trail += [p.detach().clone() for p in model.parameters()]


@usage
def closure(world: World) -> None:
    """optimizer.step(closure)."""
    model, optimizer = world.ready()
    for batch in world.batches(2):

        def again(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            return loss

        loss = optimizer.step(again)
        world.out.trail.append(float(loss))
    world.out.note_model(model)


@usage
def lbfgs(world: World) -> None:
    """LBFGS, which calls its closure several times."""
    model = world.model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    world.apply(model, optimizer)
    for batch in world.batches():

        def again(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
            loss.backward()
            return loss

        world.out.trail.append(float(optimizer.step(again)))
    world.out.trail += [p.detach().clone() for p in model.parameters()]


@usage
def two_optimizers(world: World) -> None:
    """The head has an optimizer of its own."""
    model = world.model()
    body = torch.optim.SGD([*model.embed.parameters(), *model.layers.parameters()], lr=0.05, momentum=0.9)
    head = torch.optim.SGD(model.head.parameters(), lr=0.01)
    world.apply(model, body, head)
    for batch in world.batches(2):
        body.zero_grad()
        head.zero_grad()
        loss = cross_entropy(model, batch)
        loss.backward()
        body.step()
        head.step()
        world.out.trail.append(float(loss.detach()))
    world.out.note_model(model)


@usage
def parameter_groups(world: World) -> None:
    """Groups of parameters with settings of their own."""
    model = world.model()
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    world.apply(model, optimizer)
    world.train(model, optimizer, 2)
    world.out.note_model(model)


@usage
def a_group_in_the_middle(world: World) -> None:
    """add_param_group after an epoch: the layers are trained from then on."""
    model = world.model()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.05, momentum=0.9)
    world.apply(model, optimizer)
    world.train(model, optimizer)
    model.zero_grad()
    before = model.layers[0].linear.weight.detach().clone()
    optimizer.add_param_group({"params": list(model.layers.parameters()), "lr": 0.01})
    world.train(model, optimizer)
    world.out.facts["moved"] = not torch.equal(before, model.layers[0].linear.weight)
    world.out.note_model(model)


@usage
def a_new_optimizer_in_the_middle(world: World) -> None:
    """The optimizer is made anew after an epoch, with another rate."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    optimizer.zero_grad()
    del optimizer
    other = torch.optim.SGD(model.parameters(), lr=0.005)
    world.train(model, other)
    world.out.note_model(model)


@usage
def another_kind_of_optimizer_in_the_middle(world: World) -> None:
    """AdamW for an epoch, then SGD, the first kept."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    other = torch.optim.Adam(model.parameters(), lr=0.002)
    world.train(model, other)
    world.out.facts["steps"] = bool(other.state)
    world.train(model, optimizer)
    world.out.trail += [p.detach().clone() for p in model.parameters()]


@usage
def step_hooks(world: World) -> None:
    """register_step_pre_hook and register_step_post_hook of the job's own."""
    model, optimizer = world.ready()
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    world.train(model, optimizer)
    world.out.facts["seen"] = seen
    world.out.note_model(model)


def _accumulated(world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for number, batch in enumerate(world.batches(2)):
        loss = cross_entropy(model, batch) / 3
        loss.backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        world.out.trail.append(float(loss.detach()))


@usage
def accumulation_of_the_jobs_own(world: World) -> None:
    """Gradients of three batches add up before an update."""
    model, optimizer = world.ready()
    _accumulated(world, model, optimizer)
    world.out.note_model(model)
