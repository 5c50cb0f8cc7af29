"""Knows every module of the job by number: its place in its model, its type and its parameters."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from memprof.recorder.log import RawLog


def live_objects(kind: type) -> list[Any]:
    """Lists the objects of a type (or a subclass) that the garbage collector knows.

    Asks for the type, never for `__class__`: lazy proxies answer that by loading what they stand for.
    """
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kind)]


class ModuleRegistry:
    """Numbers modules, and writes each to the `modules` stream as it is met.

    A record is [root number, qualified name, type, parent number or -1, bytes of its own parameters].
    """

    def __init__(self, log: RawLog) -> None:
        """Starts empty."""
        self._log = log
        self._numbers: dict[int, tuple[weakref.ref[torch.nn.Module], int]] = {}
        self._roots: list[weakref.ref[torch.nn.Module]] = []
        self.parameter_names: dict[int, tuple[weakref.ref[Any], str, int]] = {}

    def number(self, module: torch.nn.Module) -> int:
        """Returns a module's number, looking through the process for the model it belongs to if it is new."""
        known = self._numbers.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        self.scan()
        known = self._numbers.get(id(module))
        if known is None or known[0]() is not module:
            self._add_root(module)  # the garbage collector does not know it: a model of its own
            known = self._numbers[id(module)]
        return known[1]

    def scan(self) -> None:
        """Numbers every module alive, models first."""
        modules = [m for m in live_objects(torch.nn.Module) if "_modules" in m.__dict__]
        inner = {id(child) for m in modules for child in m._modules.values() if child is not None}
        for module in modules:
            if id(module) not in inner and self._is_new(module):
                self._add_root(module)

    def roots(self) -> Iterator[torch.nn.Module]:
        """Yields the models still alive."""
        for reference in self._roots:
            root = reference()
            if root is not None:
                yield root

    def parameter(self, tensor: torch.Tensor) -> tuple[str, int]:
        """Returns a parameter's qualified name and its module's number; "" and -1 when no model has it."""
        known = self.parameter_names.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1], known[2]
        return "", -1

    def _is_new(self, module: torch.nn.Module) -> bool:
        known = self._numbers.get(id(module))
        return known is None or known[0]() is not module

    def _add_root(self, root: torch.nn.Module) -> None:
        root_number = len(self._roots)
        self._roots.append(weakref.ref(root))
        pending: list[tuple[str, torch.nn.Module, int]] = [("", root, -1)]
        while pending:
            name, module, parent = pending.pop()
            if not self._is_new(module):
                continue
            own = list(module._parameters.items())
            record = [
                root_number,
                name,
                type(module).__name__,
                parent,
                sum(p.nbytes for _, p in own if p is not None and not _is_lazy(p)),
            ]
            number = self._log.intern("modules", (root_number, name, id(module)), record)
            self._numbers[id(module)] = (weakref.ref(module), number)
            prefix = f"{name}." if name else ""
            for key, parameter in own:
                if parameter is not None:
                    self.parameter_names[id(parameter)] = (weakref.ref(parameter), prefix + key, number)
            children = [(prefix + key, child, number) for key, child in module._modules.items() if child is not None]
            pending.extend(reversed(children))


def _is_lazy(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, torch.nn.parameter.UninitializedParameter)
