"""Casts a job's weights to the short type, and back to float32 in copies and saved files."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.swa_utils import AveragedModel

from memprof.errors import PolicyError
from memprof.policies.runtime.replaced import replace_weakly

if TYPE_CHECKING:
    from memprof.policies.runtime.job import Job


def shorten_weights(job: Job, dtype: torch.dtype) -> list[Callable[[], None]]:
    """Casts parameters, buffers, gradients and optimizer state to the short type; parameters stay the same objects.

    Returns:
        Functions that restore the exact values; the first forward empties the list, as training then moves on.
    """
    model = job.model
    if job.has_parts:
        raise PolicyError(
            "parameters are sharded over ranks and keep their type; write bf16 instead of pure-bf16, or cast the model "
            "in the script."
        )
    views = _own_views(model)
    tensors = [t for t in (*model.parameters(), *model.buffers()) if t.dtype == torch.float32]
    originals: list[Callable[[], None]] = [partial(setattr, tensor, "data", tensor.data) for tensor in tensors]
    originals += views

    def convert(wanted: torch.dtype, given: torch.dtype) -> None:
        for tensor in tensors:
            tensor.data = tensor.data.to(wanted)
            if tensor.grad is not None:
                tensor.grad.data = tensor.grad.data.to(wanted)
        for optimizer in job.optimizers:
            for parameter, state in optimizer.state.items():
                for key, value in state.items():
                    # Adam's step count is a scalar and stays float32: bfloat16 cannot count beyond 256.
                    if torch.is_tensor(value) and value.dtype == given and value.shape == parameter.shape:
                        state[key] = value.to(wanted)

    def restore() -> None:
        convert(torch.float32, dtype)
        for put_back in originals:
            put_back()

    convert(dtype, torch.float32)
    job.on_undo(restore)
    _lengthen_copies(job, tensors, dtype)
    return originals


def _own_views(model: torch.nn.Module) -> list[Callable[[], None]]:
    """Copies buffers that are views into their own memory, as ``Module.to`` does: a view keeps its whole base alive.

    Returns:
        Functions that restore the views.
    """
    owned: dict[torch.Tensor, torch.Tensor] = {}
    views: list[Callable[[], None]] = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype == torch.float32 and buffer._is_view():
                views.append(partial(module._buffers.__setitem__, name, buffer))
                module._buffers[name] = owned.setdefault(buffer, buffer.detach().clone())
    return views


def _lengthen_copies(job: Job, tensors: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Makes copies and files hold float32 again, so that they take the job's inputs and run without a plan."""
    longer = _Longer(tensors, dtype)
    for module in job.model.modules():
        job.change_copies(module, longer.change_module)
    job.on_undo(replace_weakly(AveragedModel, "update_parameters", longer.update_parameters))
    for optimizer in job.optimizers:
        job.change_copies(optimizer, longer.change_optimizer)


class _Lengthened:
    """A model with float32 tensors, as AveragedModel reads it."""

    def __init__(self, model: Any, longer: _Longer) -> None:
        self._model = model
        self._longer = longer

    def parameters(self) -> Iterator[Any]:
        return map(self._longer.lengthened, self._model.parameters())

    def buffers(self) -> Iterator[Any]:
        return map(self._longer.lengthened, self._model.buffers())


class _Longer:
    """Float32 forms of short tensors; tensors shared within one copy operation share a form."""

    def __init__(self, tensors: list[torch.Tensor], dtype: torch.dtype) -> None:
        self._short = {id(tensor): weakref.ref(tensor) for tensor in tensors}
        self._dtype = dtype
        # The copying code holds them until the copy is complete, so that shared tensors stay shared.
        self._made: weakref.WeakValueDictionary[tuple[int, int], torch.Tensor] = weakref.WeakValueDictionary()

    def update_parameters(self, before: Any, averages: AveragedModel, model: Any) -> None:
        """Passes float32 weights to torch's AveragedModel, which averages in float32 and accepts no other type."""
        before(averages, _Lengthened(model, self))

    def change_module(self, state: dict[str, Any]) -> None:
        """Converts the state of a copied module."""
        for place in ("_parameters", "_buffers"):
            if place in state:
                state[place] = type(state[place])((name, self.lengthened(each)) for name, each in state[place].items())

    def change_optimizer(self, state: dict[str, Any]) -> None:
        """Converts the state of a copied optimizer, whose parameters are those of the model's copy."""
        state["param_groups"] = [
            {**group, "params": [self.lengthened(each) for each in group["params"]]} for group in state["param_groups"]
        ]
        kept = state["state"]
        own = kept.copy()  # a defaultdict, with its factory
        own.clear()
        for key, values in kept.items():
            is_ours = self._is_short(key)
            own[self.lengthened(key)] = {
                name: value.float() if is_ours and torch.is_tensor(value) and value.dtype == self._dtype else value
                for name, value in values.items()
            }
        state["state"] = own

    def _is_short(self, tensor: Any) -> bool:
        known = self._short.get(id(tensor))
        return known is not None and known() is tensor

    def lengthened(self, tensor: Any) -> Any:
        """Returns a tensor in float32 if it was shortened, else the tensor itself."""
        if not self._is_short(tensor):
            return tensor
        key = id(tensor), tensor._version
        made = self._made.get(key)
        if made is None:
            made = tensor.detach().float()
            if isinstance(tensor, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
            self._made[key] = made
        return made
