"""Makes a job compute in a lower-precision type without changes to its script."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from memprof.errors import PolicyError
from memprof.policies.precision.policy import LBFGS, NO_BF16
from memprof.policies.precision.pure import shorten_weights
from memprof.policies.precision.scaling import LossScaling
from memprof.policies.runtime.job_traits import OwnReruns
from memprof.policies.runtime.replaced import is_in_transform, replace, until_gone
from memprof.recorder.machine import short_types

if TYPE_CHECKING:
    from memprof.policies.precision.policy import Precision
    from memprof.policies.runtime.job import Effect, Job

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Forward = Callable[..., Any]


def apply(job: Job, policy: Precision) -> None:
    """Runs the root module in the short type from now on; its outputs remain float32.

    Raises:
        PolicyError: The model or the machine does not support it; nothing has been changed.
    """
    dtype = DTYPES[policy.dtype]
    _refuse(job, policy)
    if dtype == torch.bfloat16:
        job.on_undo(until_gone(job.model, replace(torch.Tensor, "numpy", _numpy_in_float32)))
    if policy.is_pure:
        originals = shorten_weights(job, dtype)
        root = _PureRoot(job.model, dtype, originals)
        job.wrap_forward(job.model, root.wrap, in_export=True)
        for module in job.model.modules():
            if module is not job.model and any(True for _ in module.parameters(recurse=False)):
                job.wrap_forward(module, functools.partial(root.wrap_part, module), in_export=True)
        job.notes.append(
            "precision: parameters, gradients and optimizer state are bfloat16; updates smaller than 1/256 of a weight "
            "are rounded away, so compare the loss curve."
        )
        return
    scaling = LossScaling(job) if policy.dtype == "fp16" else None
    returned = _Returned(job.model)
    leave = returned.noting(scaling.leave if scaling else _to_float32)
    device, model = job.device.type, job.model

    def begin(tensors: Any) -> Any:
        if not returned.is_trained and returned.holds_any(tensors):
            tensors = map_tensors(returned.enter, tensors)
        if scaling is None:
            return tensors
        scaling.watch(model.parameters())
        return map_tensors(scaling.enter, tensors)

    reruns = OwnReruns(functools.partial(torch.autocast, device, dtype=dtype))
    job.on_undo(reruns.install())
    effect = job.expect(policy.describe(), "the job's own autocast computes in this type already")
    job.wrap_forward(model, lambda forward: _in_autocast(model, forward, reruns, device, dtype, begin, leave, effect))


def _numpy_in_float32(before: Forward) -> Forward:
    """Wraps ``Tensor.numpy``, also called by ``np.asarray``: NumPy has no bfloat16, and the job expects float32."""

    def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return before(tensor.float() if tensor.dtype == torch.bfloat16 else tensor, *args, **kwargs)

    return numpy


def _refuse(job: Job, policy: Precision) -> None:
    if not any(p.dtype == torch.float32 for p in job.model.parameters()):
        raise PolicyError(
            f"precision: {type(job.model).__name__} has no float32 parameters to cast; leave the policy out."
        )
    device = job.device.type
    if not torch.amp.autocast_mode.is_autocast_available(device):
        raise PolicyError(f"precision: this torch has no autocast for {device}; leave the policy out.")
    if device == "cuda" and policy.dtype == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise PolicyError(NO_BF16)
    # For the other recurrent layers torch has bf16 kernels of its own.
    recurrent = torch.nn.RNNBase if policy.dtype == "fp16" else torch.nn.LSTM
    if device == "cpu" and any(isinstance(module, recurrent) for module in job.model.modules()):
        if policy.dtype == "fp16":  # oneDNN has no such training primitive, and torch no other path in autocast
            raise PolicyError("precision: torch cannot train recurrent layers in fp16 on a CPU; write dtype = 'bf16'.")
        if policy.torch_name not in short_types():
            raise PolicyError(
                f"precision: torch cannot train recurrent layers in {policy.dtype} on this processor (oneDNN has no "
                "kernels for it); leave the policy out."
            )
    if policy.dtype != "fp16":
        return
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in job.optimizers):
        raise PolicyError(LBFGS)


def _in_autocast(
    model: torch.nn.Module,
    forward: Forward,
    reruns: OwnReruns,
    device: str,
    dtype: torch.dtype,
    begin: Callable[[Any], Any],
    leave: Callable[[torch.Tensor], torch.Tensor],
    effect: Effect,
) -> Forward:
    @functools.wraps(forward)
    def in_autocast(*args: Any, **kwargs: Any) -> Any:
        if not any(parameter.dtype == torch.float32 for parameter in model.parameters()):
            return forward(*args, **kwargs)  # the job has cast its model itself
        args, kwargs = begin((args, kwargs))
        if not torch.compiler.is_compiling():
            effect.is_tried = True
            effect.is_done |= not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != dtype
        with torch.autocast(device, dtype=dtype), reruns.region():
            outputs = forward(*args, **kwargs)
        return map_tensors(leave, outputs)

    return in_autocast


class _Returned:
    """Results that left a model as float32 copies while it was not trained: in eval mode, or with autograd off.

    In training, float32 results that are passed back stay float32, as predicted from the recorded steps.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._types: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @property
    def is_trained(self) -> bool:
        """Whether the current call of the model may be part of a training step."""
        return self._model.training and torch.is_grad_enabled()

    def noting(self, leave: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Wraps the cast of results so that the type of each is noted; values and shapes are unchanged."""

        def left(tensor: torch.Tensor) -> torch.Tensor:
            copy = leave(tensor)
            if copy.dtype != tensor.dtype and not self.is_trained:
                self._types[copy] = tensor.dtype, _version(copy)
            return copy

        return left

    def holds_any(self, arguments: Any) -> bool:
        """Returns whether nested arguments contain such a result."""
        return bool(self._types) and any(
            isinstance(each, torch.Tensor) and each in self._types for each in pytree.tree_leaves(arguments)
        )

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an argument in the type in which the model returned it, as autocast alone would pass it.

        A result that was changed in place since stays float32: the new values may not be representable in that type.
        """
        if tensor not in self._types:
            return tensor
        dtype, version = self._types[tensor]
        return tensor.to(dtype) if version == _version(tensor) else tensor


def _version(tensor: torch.Tensor) -> int:
    """Returns a number that changes with every change in place; 0 in inference mode, which does not count them."""
    return 0 if tensor.is_inference() else tensor._version


class _PureRoot:
    """Runs a model with short weights: inputs are cast to the short type, outputs to float32."""

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype, originals: list[Any]) -> None:
        self._model = model
        self._dtype = dtype
        self._originals = originals
        self._of_thread = threading.local()

    def wrap(self, forward: Forward) -> Forward:
        """Wraps the forward of the model."""

        @functools.wraps(forward)
        def in_pure(*args: Any, **kwargs: Any) -> Any:
            if any(p.dtype == torch.float32 and type(p) is torch.Tensor for p in self._model.parameters()):
                # torch.func.functional_call has substituted weights of the job's own.
                return self._run(forward, args, kwargs, is_plain=True)
            self._shorten_new()
            return self._run(forward, args, kwargs)

        return in_pure

    def wrap_part(self, module: torch.nn.Module, forward: Forward) -> Forward:
        """Wraps the forward of a submodule, which a script may call directly."""
        is_taken_long = False

        @functools.wraps(forward)
        def in_part(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_taken_long
            is_long = any(
                isinstance(each, torch.Tensor) and each.dtype == torch.float32
                for each in pytree.tree_leaves((args, kwargs))
            )
            if not is_long:
                return forward(*args, **kwargs)
            if getattr(self._of_thread, "is_inside", False):
                if any(each.dtype == torch.float32 for each in module.parameters(recurse=False)):
                    return forward(*args, **kwargs)
                # The model read them from an object that pytree does not open, or cast them to float32 itself.
                is_taken_long = True
            elif not is_taken_long:
                return self._run(forward, args, kwargs)
            # Checkpointing also calls the part directly, with the arguments it had inside the model.
            args, kwargs = map_tensors(self._shorten, (args, kwargs))
            return forward(*args, **kwargs)

        return in_part

    def _run(self, forward: Forward, args: Any, kwargs: Any, *, is_plain: bool = False) -> Any:
        self._originals.clear()
        before = getattr(self._of_thread, "is_inside", False)
        self._of_thread.is_inside = True
        try:
            if not is_plain:
                args, kwargs = map_tensors(self._shorten, (args, kwargs))
            outputs = forward(*args, **kwargs)
        except RuntimeError as error:
            if "BFloat16" not in str(error) or before:
                raise
            raise PolicyError(
                f"precision: {type(self._model).__name__} does not run in bfloat16: {str(error).splitlines()[0]}; "
                "cast the operands there to one type, or write bf16 instead of pure-bf16."
            ) from error
        finally:
            self._of_thread.is_inside = before
        return outputs if is_plain else map_tensors(_to_float32, outputs)

    def _shorten(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.dtype == torch.float32 else tensor

    def _shorten_new(self) -> None:
        """Casts to the short type the weights that the job has added or cast since, and their gradients."""
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            if tensor.dtype == torch.float32 and tensor.is_leaf and not is_in_transform():
                gradient, tensor.grad = tensor.grad, None
                tensor.data = tensor.data.to(self._dtype)
                tensor.grad = None if gradient is None else gradient.to(self._dtype)


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    # float64, integers and float32 pass through unchanged.
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Applies a function to every tensor in nested tuples, lists, dicts, dataclasses and other pytree types."""
    leaves, spec = pytree.tree_flatten(value)
    return pytree.tree_unflatten([_map_leaf(change, leaf) for leaf in leaves], spec)


def _map_leaf(change: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return change(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        fields = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf) if f.init}
        changed = {name: map_tensors(change, value) for name, value in fields.items()}
        # A dataclass without tensors is returned as the same object.
        if any(changed[name] is not value for name, value in fields.items() if not _is_container(value)) or any(
            _holds_tensor(value) for value in fields.values()
        ):
            return dataclasses.replace(leaf, **changed)
    if isinstance(leaf, MutableMapping):  # a dict subclass that pytree does not handle: a model's output
        changed = {key: map_tensors(change, value) for key, value in leaf.items()}
        if any(changed[key] is not value and not _is_container(value) for key, value in leaf.items()) or any(
            _holds_tensor(value) for value in leaf.values() if _is_container(value)
        ):
            clone = copy.copy(leaf)
            clone.update(changed)
            return clone
    return leaf


def _is_container(value: Any) -> bool:
    return isinstance(value, (tuple, list, dict))


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
