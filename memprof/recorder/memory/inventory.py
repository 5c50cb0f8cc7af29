"""Categorizes memory: parameters, buffers, gradients, optimizer state, inputs, and tensors allocated before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from memprof.recorder.calls.module_registry import ModuleRegistry
from memprof.recorder.clock import clock_ns
from memprof.recorder.log import RawLog
from memprof.recorder.memory.live_objects import OutsideWatch, live_objects
from memprof.recorder.memory.tensor_memory import (
    PLAIN,
    gradient_of,
    holders_of,
    modules_of,
    owned_span,
    parameters_of,
    plain_tensors,
    storage_span,
)
from memprof.recorder.steps.rounds import OptimizerRounds
from memprof.recorder.steps.usages import state_of
from memprof.trace.files.spool import ACTIVATION, BUFFER, GRADIENT, HELD, INPUT, OPTIMIZER_STATE, PARAMETER

#: What training keeps counts wherever it lies; all else only where torch's allocator owns it.
_KEPT = (PARAMETER, BUFFER, OPTIMIZER_STATE)
_NESTED = (list, tuple)
_DEPTH = 6


def tensors_in(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested lists, tuples, dictionaries and fields of plain objects (batches, model outputs)."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, _NESTED):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth and hasattr(type(value), "__dataclass_fields__"):
        for name in type(value).__dataclass_fields__:
            yield from tensors_in(getattr(value, name, None), depth - 1)


class Inventory:
    """Logs facts about memory at chosen times; a fact holds for the storage live at its address then.

    Attributes:
        storage_span: Returns the address and bytes of a tensor's storage.
        owned_span: The same for storages owned by torch's allocator.
        outside: Follows parameters, buffers and optimizer state in memory that torch's allocator does not own.
    """

    def __init__(self, log: RawLog, registry: ModuleRegistry, rounds: OptimizerRounds) -> None:
        self._log = log
        self._registry = registry
        self._rounds = rounds
        self.outside = OutsideWatch(log)
        self.storage_span, self.owned_span = storage_span, owned_span

    def models(self) -> None:
        """Logs every model's parameters, buffers and gradients."""
        for root in self._registry.roots():
            for module in modules_of(root):
                number = self._registry.number(module)
                for parameter in module._parameters.values():
                    if parameter is not None:
                        name, owner = self._registry.parameter(parameter)
                        self._state(parameter, PARAMETER, name, owner if name else number)
                        self._gradient(gradient_of(parameter), name, owner)
                for key, buffer in module._buffers.items():
                    if buffer is not None:
                        self._state(buffer, BUFFER, key, number)

    def model_gradients(self) -> None:
        """Logs the gradients of every model's parameters."""
        for root in self._registry.roots():
            for parameter in parameters_of(root):
                self._gradient(gradient_of(parameter), *self._registry.parameter(parameter))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Logs an optimizer's state and the parameters it updates."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name, owner = self._registry.parameter(parameter)
                self._state(parameter, PARAMETER, name, owner)
        for parameter, state in list(state_of(optimizer).items()):
            name, owner = self._registry.parameter(parameter) if isinstance(parameter, torch.Tensor) else ("", -1)
            self._state_values(state, name, owner)

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Logs the gradients an optimizer is about to use."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad if parameter.is_leaf else None  # this thread's, whoever calls the model too
                self._gradient(gradient, *self._registry.parameter(parameter))

    def leaves(self) -> None:
        """Logs the tensors that need gradients, and those: what a job without models trains."""
        for tensor in live_objects(torch.Tensor):
            if not is_computed(tensor) and tensor.requires_grad:
                self._state(tensor, PARAMETER, "", -1)
                self._gradient(gradient_of(tensor), "", -1)

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Logs a model's inputs."""
        for tensor in tensors_in([args, kwargs]):
            self._state(tensor, INPUT, "", -1)

    def saved(self, tensor: torch.Tensor, node: str) -> None:
        """Logs a tensor that an autograd node has saved."""
        self._state(tensor, ACTIVATION, node, -1)

    def variable(self, tensor: torch.Tensor, name: str) -> None:
        """Logs a tensor that a variable of the job refers to, and that was not computed from a parameter."""
        self._state(tensor, HELD, name, -1)

    def held(self, remember: Callable[[torch.Tensor], None] | None) -> None:
        """Logs every tensor held by Python, to identify what was allocated before the recording.

        Args:
            remember: Called with each tensor, if the event source does not report frees of older memory.
        """
        tensors = live_objects(torch.Tensor)
        parameters = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
        self.alive((plain for tensor in tensors for plain in holders_of(tensor)), parameters, remember)
        self.tensors(tensors)

    def tensors(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Logs tensors of which nothing else is known; returns those with a graph."""
        found = []
        for tensor in tensors:
            has_graph = is_computed(tensor)
            if has_graph:
                found.append(tensor)
            unowned = ACTIVATION if has_graph else HELD
            self._state(tensor, PARAMETER if isinstance(tensor, torch.nn.Parameter) else unowned, "", -1)
        return found

    def alive(
        self,
        tensors: Iterable[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        remember: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """Logs the storages alive before the events that follow: of tensors, and what training keeps elsewhere.

        Args:
            tensors: The tensors, of which those that torch's allocator owns are logged.
            parameters: Parameters, of which the others are logged too.
            remember: Called with each tensor that is logged.
        """
        now = clock_ns()
        seen: set[int] = set()
        for tensor in tensors:
            address, size = self.owned_span(tensor)
            if address and address not in seen:
                seen.add(address)
                self._log.alive.extend((now, address, size))
                if remember is not None:
                    remember(tensor)
        for tensor in (*parameters, *self.kept_by_training()):
            for inner in _inners(tensor):
                self.outside.remember(inner)
        self.outside.is_running = True
        for address, size in self.outside.spans():
            if address not in seen:
                self._log.alive.extend((now, address, -size))

    def kept_by_training(self, is_trained: Callable[[torch.nn.Module], bool] | None = None) -> list[torch.Tensor]:
        """Lists the tensors of models and optimizers: parameters, gradients, buffers and state.

        Args:
            is_trained: Returns whether a model counts; None where all do.
        """
        found: list[torch.Tensor] = []
        for root in self._registry.roots():
            if is_trained is not None and not is_trained(root):
                continue
            for parameter in parameters_of(root):
                found.append(parameter)
                if (gradient := gradient_of(parameter)) is not None:
                    found.append(gradient)
            found += parameters_of(root, buffers=True)
        for optimizer in self._rounds.alive():
            for state in state_of(optimizer).values():
                values = state.values() if isinstance(state, dict) else ()
                found += [value for value in values if isinstance(value, torch.Tensor)]
        return found

    def _state(self, tensor: torch.Tensor, category: int, name: str, module: int) -> None:
        for inner in _inners(tensor):
            address, size = self.storage_span(inner)
            if address:
                if category in _KEPT and self.outside.is_running:
                    self.outside.watch(inner, clock_ns())
                text = self._log.intern("names", name) if name else -1
                self._log.add_fact(address, size, category, text, module, self._log.tensor_number(inner))

    def _state_values(self, state: Any, name: str, owner: int, key: str = "") -> None:
        if isinstance(state, torch.Tensor):
            self._state(state, OPTIMIZER_STATE, ".".join(part for part in (name, key) if part), owner)
        elif isinstance(state, dict):
            for inner_key, value in state.items():
                self._state_values(value, name, owner, str(inner_key))
        elif isinstance(state, _NESTED):
            for value in state:
                self._state_values(value, name, owner, key)

    def _gradient(self, gradient: torch.Tensor | None, name: str, owner: int) -> None:
        if gradient is not None:
            self._state(gradient, GRADIENT, name, owner)


def _inners(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    if type(tensor) in PLAIN and tensor.layout is torch.strided:
        return (tensor,)
    # A lazy module that has not been called has parameters without a shape yet.
    return () if is_lazy(tensor) else plain_tensors(tensor)


def is_computed(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a ``grad_fn``."""
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # one of several views whose base was written to, such as FSDP's of a flat parameter
        return True
