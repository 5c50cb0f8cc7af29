"""Stages 2 and 3: applies torch's fully_shard to chosen units of an unmodified model."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from memprof.errors import PolicyError
from memprof.policies.shard.division import choose_units
from memprof.policies.shard.process_group import gather, is_gloo
from memprof.recorder.memory.live_objects import find_referrers

if TYPE_CHECKING:
    from memprof.policies.runtime.job import Job
    from memprof.policies.shard.policy import Shard

#: Location of a parameter: the module that holds it, and its name there.
_Place = tuple[torch.nn.Module, str]


def units_of(model: torch.nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Returns the modules whose parameters are gathered together, without the root's unit, "".

    Raises:
        PolicyError: A pattern matches no module.
    """
    modules = dict(model.named_modules())
    places = {name: place for place, name in enumerate(modules)}
    parents = [places.get(name.rpartition(".")[0], -1) if name else -1 for name in modules]
    names = choose_units(patterns, list(modules), [type(each).__name__ for each in modules.values()], parents)
    return [name for name in names if any(True for _ in modules[name].parameters())]


def check_units(model: torch.nn.Module, names: list[str]) -> None:
    """Rejects models that fully_shard cannot shard.

    Raises:
        PolicyError: Names the parameter and the reason.
    """
    unit_of: dict[int, tuple[str, str]] = {}
    types: dict[str, dict[torch.dtype, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((each for each in names if name.startswith(f"{each}.")), "")
        first, first_unit = unit_of.setdefault(id(parameter), (name, unit))
        if first_unit != unit:
            raise PolicyError(
                f"{first} and {name} are one parameter in two units, which cannot be gathered separately: choose "
                f"units that hold both, or leave {_title(first_unit or unit)} out of the units."
            )
        if not parameter.dim():
            raise PolicyError(f"{name} is zero-dimensional and cannot be sharded; give it the shape (1,).")
        if parameter.requires_grad:
            types.setdefault(unit, {}).setdefault(parameter.dtype, name)
    for unit, found in types.items():
        if len(found) > 1:
            (one, name), (other, other_name) = list(found.items())[:2]
            raise PolicyError(
                f"{_title(unit)} trains parameters of two types, which cannot be gathered together: {name} is "
                f"{str(one).removeprefix('torch.')}, {other_name} is {str(other).removeprefix('torch.')}; cast the "
                "model to one, or make units of the modules that differ."
            )


def shard_fully(job: Job, policy: Shard, names: list[str]) -> int:
    """Shards the model's parameters, and with them gradients and optimizer state.

    Args:
        job: The job; its optimizers have no state yet.
        policy: Stage 3 frees a unit's parameters after its forward if set so, stage 2 never.
        names: The units besides the root's.

    Returns:
        Number of references to old parameters that could not be replaced.

    Raises:
        PolicyError: torch cannot shard the model, for a reason of its own; nothing has been changed.
    """
    model = job.model
    _lay_out_rows(job)
    modules = dict(model.named_modules())
    chosen = [*(modules[name] for name in names), model]
    before = _placed(model)
    classes = [(module, type(module)) for module in chosen]
    mesh = init_device_mesh(job.device.type, (policy.world_size,))
    try:
        for module in chosen[:-1]:
            fully_shard(module, mesh=mesh, reshard_after_forward=policy.stage == 3 and policy.reshard_after_forward)
        # Backward needs the root's unit first: freed after forward, it would be gathered again at once.
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    except (NotImplementedError, ValueError, RuntimeError, AssertionError) as error:
        for (module, key), old in before:
            module._parameters[key] = old
        _take_hooks_away(classes)
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise PolicyError(f"torch's fully_shard cannot shard this model: {reason}; use stage 0 or 1.") from error
    for module, kind in classes:
        type(module).__name__ = kind.__name__  # keeps the printed form of the model unchanged
    if is_gloo(job.device):
        for module in chosen:
            assert isinstance(module, FSDPModule)
            module.set_custom_all_gather(_Gather())  # type: ignore[arg-type]  # torch's base class is not public
            module.set_custom_reduce_scatter(_Scatter())  # type: ignore[arg-type]
    exchange: Exchange = {
        id(old): (old, new)
        for (module, key), old in before
        if (new := module._parameters[key]) is not None and new is not old
    }
    del before
    left = exchange_everywhere(exchange)
    exchange.clear()
    root: Any = model  # torch's method is not annotated
    handle = root.register_state_dict_post_hook(_gather_state)
    job.on_undo(lambda: _unshard(model, classes))
    job.on_undo(handle.remove)
    return left


class _Buffers:
    """Allocates the buffers of collectives from torch's allocator, as fully_shard does by default."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Allocates a buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Buffers):
    """All-gather over gloo within the given buffer."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        """Fills the output with the parts of all ranks."""
        gather(output_tensor, input_tensor, group)


class _Scatter(_Buffers):
    """Reduce-scatter over gloo within the given buffer.

    gloo has no reduce-scatter; torch emulates it by an all-reduce of a copy, which lives until one of gloo's threads
    drops it.
    """

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Leaves this rank's part of the sum in the output."""
        dist.all_reduce(input_tensor, op=op, group=group)
        output_tensor.copy_(input_tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)])


def _placed(model: torch.nn.Module) -> list[tuple[_Place, torch.nn.Parameter]]:
    return [
        ((module, key), parameter)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]


def _gather_state(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Replaces shards by whole tensors in the model's state dict, so that a script saves the same file as unsharded."""
    for name, value in state.items():
        if isinstance(value, DTensor):
            state[name] = value.full_tensor()


def _unshard(model: torch.nn.Module, classes: list[tuple[torch.nn.Module, type[torch.nn.Module]]]) -> None:
    """Restores the model's whole parameters, and removes the hooks."""
    for module, _ in classes:
        assert isinstance(module, FSDPModule)
        module.reshard()
    pairs = list(_whole(model))
    exchange: Exchange = {id(old): (old, new) for old, new in pairs}
    _take_hooks_away(classes)
    del pairs
    exchange_everywhere(exchange)


def _take_hooks_away(classes: list[tuple[torch.nn.Module, type[torch.nn.Module]]]) -> None:
    """Undoes fully_shard on the modules; the caller restores their parameters."""
    for module, kind in classes:
        if not isinstance(module, FSDPModule):
            continue
        state = fully_shard.state(module)  # type: ignore[attr-defined]  # set by torch's decorator
        for name in ("_pre_forward_hook_handle", "_post_forward_hook_handle"):
            getattr(state, name).remove()
        for key in (STATE_KEY, REGISTRY_KEY):
            module.__dict__.get(key, {}).clear()
        object.__setattr__(module, "__class__", kind)


def _lay_out_rows(job: Job) -> None:
    """Makes parameters in another memory format, such as channels_last, row-major: shards are rows."""
    others = [each for each in job.model.parameters() if not each.is_contiguous()]
    for parameter in others:
        parameter.data = parameter.data.contiguous()
    if others:
        job.notes.append(f"{len(others)} parameters in another memory format (channels_last) are laid out in rows.")


def _whole(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, torch.nn.Parameter]]:
    made: dict[int, torch.nn.Parameter] = {}
    for _, parameter in _placed(model):
        if isinstance(parameter, DTensor) and id(parameter) not in made:
            own: Any = parameter.detach()  # also for a DTensor
            whole = torch.nn.Parameter(own.full_tensor(), requires_grad=parameter.requires_grad)
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                whole.grad = gradient.full_tensor()
            made[id(parameter)] = whole
            yield parameter, whole


def _title(unit: str) -> str:
    return unit or "the root's unit"


_DICTIONARIES = (dict, OrderedDict, defaultdict)

#: Old and new parameter, by the id of the old one, which stays alive with this dictionary.
Exchange = dict[int, tuple[torch.Tensor, torch.Tensor]]


def exchange_everywhere(exchange: Exchange) -> int:
    """Replaces parameters in every list and dictionary value that holds them.

    Examples are optimizers' groups, a script's lists of parameters to clip, and its variables.

    Returns:
        Number of remaining references to old ones that cannot be changed, such as in tuples.
    """
    old = [pair[0] for pair in exchange.values()]
    own = {id(old), id(exchange), *(id(pair) for pair in exchange.values())}
    left = 0
    for holder in find_referrers(old):
        if id(holder) in own:
            continue
        if type(holder) is list:
            holder[:] = [_exchanged(exchange, each) for each in holder]
        elif type(holder) in _DICTIONARIES:
            for key, value in list(holder.items()):
                new = _exchanged(exchange, value)
                if new is not value:
                    holder[key] = new
        elif type(holder) is tuple:
            left += 1
    return left


def _exchanged(exchange: Exchange, value: Any) -> Any:
    pair = exchange.get(id(value))
    return pair[1] if pair is not None and pair[0] is value else value
