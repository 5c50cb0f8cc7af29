"""Copies of a model: in memory, on disk, averaged."""

from __future__ import annotations

import copy
import io
import pickle

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from tests.policies.matrix.catalog import usage
from tests.policies.matrix.world import World


def _use_copy(world: World, model: nn.Module, twin: nn.Module) -> None:
    """Notes whether a copy is a model of its own."""
    x = world.inputs()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    world.out.facts["type"] = type(twin).__name__
    world.out.facts["shares"] = bool(
        {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in twin.parameters()}
    )
    world.out.numbers["answer"] = twin(x).detach()
    world.train(twin, world.sgd(twin))
    world.out.note_model(twin, "twin.")
    world.out.facts["original moved"] = any(
        not torch.equal(before[name], value) for name, value in model.state_dict().items()
    )
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    world.out.facts["zeroed copy answers zero"] = float(twin(x).abs().max()) == 0.0
    twin.eval()
    world.out.facts["zeroed copy answers zero in eval"] = float(twin(x).abs().max()) == 0.0


@usage
def deepcopy_before_the_first_step(world: World) -> None:
    """copy.deepcopy(model) before the first step; the copy is trained."""
    model, optimizer = world.ready()
    _use_copy(world, model, copy.deepcopy(model))
    world.train(model, optimizer)
    world.out.note_model(model)


@usage
def deepcopy_after_a_step(world: World) -> None:
    """copy.deepcopy(model) after some steps; the copy is trained, then the original further."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    _use_copy(world, model, copy.deepcopy(model))
    world.train(model, optimizer)
    world.out.note_model(model)


@usage
def deepcopy_of_a_layer(world: World) -> None:
    """copy.deepcopy of a layer, which is put into the model."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    model.layers.append(copy.deepcopy(model.layers[0]))
    with torch.no_grad():
        model.layers[2].linear.weight.zero_()
        model.layers[2].linear.bias.zero_()
    optimizer.add_param_group({"params": list(model.layers[2].parameters())})
    world.out.numbers["answer"] = model(world.inputs()).detach()
    world.train(model, optimizer)
    world.out.note_model(model)


@usage
def deepcopy_of_model_and_optimizer(world: World) -> None:
    """copy.deepcopy of the model and the optimizer together; the copies are trained."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    twin, other = copy.deepcopy((model, optimizer))
    world.train(twin, other)
    world.out.note_model(twin, "twin.")
    world.train(model, optimizer)
    world.out.note_model(model)


@usage
def torch_save_of_the_model(world: World) -> None:
    """torch.save(model) after an epoch, loaded and trained."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    _use_copy(world, model, torch.load(file, weights_only=False))


@usage
def pickle_of_the_model(world: World) -> None:
    """pickle.dumps(model) before the first step, loaded and trained."""
    model, optimizer = world.ready()
    _use_copy(world, model, pickle.loads(pickle.dumps(model)))
    world.train(model, optimizer)
    world.out.note_model(model)


@usage
def state_dict_names(world: World) -> None:
    """state_dict() and optimizer.state_dict(), their keys and their order."""
    model, optimizer = world.ready()
    world.out.facts["keys before"] = list(model.state_dict())
    world.train(model, optimizer)
    world.out.facts["keys"] = list(model.state_dict())
    state = optimizer.state_dict()
    world.out.facts["optimizer keys"] = [sorted(map(str, state)), sorted(state["state"])]
    world.out.facts["state keys"] = [sorted(map(str, one)) for one in state["state"].values()]
    world.out.facts["group keys"] = [len(group["params"]) for group in state["param_groups"]]
    for number, one in state["state"].items():
        for key, value in one.items():
            if isinstance(value, torch.Tensor):
                world.out.numbers[f"state {number} {key}"] = value.clone()
    world.out.note_model(model)


@usage
def checkpoint_and_resume(world: World) -> None:
    """Model and optimizer are saved after an epoch, and loaded again after another."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    world.train(model, optimizer)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    world.out.facts["loaded"] = str(model.load_state_dict(saved["model"]))
    optimizer.load_state_dict(saved["optimizer"])
    world.train(model, optimizer)
    world.out.note_model(model)


@usage
def checkpoint_for_another_process(world: World) -> None:
    """What was saved under a plan is loaded into a model without one."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    plain = world.model()
    other = world.sgd(plain)
    world.out.facts["loaded"] = str(plain.load_state_dict(saved[0]))
    other.load_state_dict(saved[1])
    world.out.numbers["answer"] = plain(world.inputs()).detach()
    world.out.note_model(plain)


@usage
def best_model_by_state_dict(world: World) -> None:
    """The best state_dict is kept by deepcopy and loaded at the end."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    best = copy.deepcopy(model.state_dict())
    world.train(model, optimizer)
    model.load_state_dict(best)
    world.out.note_model(model)
    world.out.numbers["answer"] = model(world.inputs()).detach()


@usage
def ema_of_the_model(world: World) -> None:
    """torch.optim.swa_utils.AveragedModel follows the model, and is evaluated."""
    model, optimizer = world.ready()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(2):
        world.train(model, optimizer)
        average.update_parameters(model)
    world.out.numbers["answer"] = average(world.inputs()).detach()
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    world.out.facts["zeroed average answers zero"] = float(average(world.inputs()).abs().max()) == 0.0
    world.out.note_model(model)


@usage
def swa_with_batchnorm_update(world: World) -> None:
    """Stochastic weight averaging: AveragedModel and update_bn at the end."""
    model, optimizer = world.ready()
    average = AveragedModel(model)
    for _ in range(2):
        world.train(model, optimizer)
        average.update_parameters(model)
    with torch.no_grad():
        update_bn(world.loader(), average)
    world.out.numbers["answer"] = average(world.inputs()).detach()


@usage
def teacher_by_hand(world: World) -> None:
    """A frozen deepcopy of the model is its teacher, its weights moved by hand."""
    model, optimizer = world.ready()
    teacher = copy.deepcopy(model).requires_grad_(False)
    for x, y in world.batches(2):
        with torch.no_grad():
            soft = teacher(x).softmax(-1)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y) - (soft * model(x).log_softmax(-1)).sum(-1).mean()
        loss.backward()
        optimizer.step()
        world.out.trail.append(float(loss.detach()))
    with torch.no_grad():
        for mine, other in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.lerp_(other, 0.5)
    world.out.note_model(model)
    world.out.numbers["teacher"] = teacher(world.inputs())


@usage
def weights_of_another_model(world: World) -> None:
    """parameters_to_vector and vector_to_parameters."""
    model, optimizer = world.ready()
    world.train(model, optimizer)
    vector = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    nn.utils.vector_to_parameters(vector * 0, model.parameters())
    world.out.facts["zeroed model answers zero"] = float(model(world.inputs()).abs().max()) == 0.0
    nn.utils.vector_to_parameters(vector, model.parameters())
    world.train(model, optimizer)
    world.out.note_model(model)
