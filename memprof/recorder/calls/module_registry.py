"""Numbers every module of the job: its position in its model, its type and its parameters."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from memprof.recorder.log import RawLog
from memprof.recorder.memory.live_objects import outermost_modules
from memprof.recorder.memory.tensor_memory import modules_of, named_modules_of, parameter_bytes_of


class ModuleRegistry:
    """Numbers modules and writes each to the `modules` stream when first seen.

    A record is [root number, qualified name, type, parent number or -1, bytes of its own parameters]. A job may cast
    or replace parameters later: `resized` returns what has changed.

    Attributes:
        holders: Number of modules seen that own parameters or buffers.
        root_ids: Numbers of the root models by address, which another object may occupy by now.
    """

    def __init__(self, log: RawLog) -> None:
        self.holders = 0
        self._log = log
        self._numbers: dict[int, tuple[weakref.ref[torch.nn.Module], int]] = {}
        self._met = 0
        self._roots: dict[int, weakref.ref[torch.nn.Module]] = {}
        self.root_ids: dict[int, int] = {}
        self._root_count = 0
        self._parameters: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._own_bytes: dict[int, int] = {}
        self._places: list[tuple[int, str, str]] = []  # root number, qualified name, type of each module
        self._named: dict[tuple[int, str], int] = {}

    def number(self, module: torch.nn.Module) -> int:
        """Returns a module's number, finding the model it belongs to if it is new."""
        known = self._numbers.get(id(module))
        if known is not None and known[0]() is module:  # at every call of a module
            return known[1]
        self._walk_roots()
        if self._is_new(module) and (module._modules or module._parameters or module._buffers):
            self.scan()
        if self._is_new(module):
            self._add_root(module)  # created on the fly, as in nn.Softmax()(x): its own root model
        return self._numbers[id(module)][1]

    def find(self, module: torch.nn.Module | None) -> int:
        """Returns the number of a module seen before, -1 for others."""
        return -1 if module is None or self._is_new(module) else self._numbers[id(module)][1]

    def below(self, number: int, path: str, kind: str, address: int) -> int:
        """Returns the number of a module inside another, -1 if none is known.

        Args:
            number: Number of the outer module; -1 for any.
            path: The module's name below the outer one; "" if unknown.
            kind: Name of its type.
            address: Its address, or that of a module with the same place in an equal model.
        """
        known = self._numbers.get(address)
        exact = -1 if known is None or known[0]() is None else known[1]
        if number < 0:
            return exact
        root, name = self._places[number][:2]
        prefix = f"{name}." if name else ""
        if exact >= 0 and self._places[exact][0] == root and self._places[exact][1].startswith(prefix):
            return exact
        found = self._named.get((root, prefix + path), -1) if path else -1
        return found if found >= 0 and self._places[found][2] == kind else exact

    def scan(self) -> None:
        """Numbers every live module: first additions to known models, then new models."""
        self._walk_roots()
        for root in _outer_first([module for module in outermost_modules() if self._is_new(module)]):
            self._add_root(root)

    def roots(self) -> Iterator[torch.nn.Module]:
        """Yields the models that are still alive."""
        for reference in list(self._roots.values()):
            root = reference()
            if root is not None:
                yield root

    def resized(self) -> list[list[int]]:
        """Returns the modules whose own parameters take other bytes than when last returned: numbers and bytes."""
        found = []
        for reference, number in list(self._numbers.values()):
            module = reference()
            own_bytes = self._own_bytes[number] if module is None else parameter_bytes_of(module)
            if own_bytes != self._own_bytes[number]:
                self._own_bytes[number] = own_bytes
                found.append([number, own_bytes])
        return found

    def root_number(self, module: torch.nn.Module) -> int:
        """Returns the number of a model, -1 for anything that is neither a model nor part of one."""
        number = self.root_ids.get(id(module), -1)
        return number if number >= 0 and self._roots[number]() is module else -1

    def parameter(self, tensor: torch.Tensor) -> tuple[str, int]:
        """Returns a parameter's qualified name and its module's number; "" and -1 if no model contains it."""
        known = self._parameters.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1], known[2]
        return "", -1

    def _is_new(self, module: torch.nn.Module) -> bool:
        known = self._numbers.get(id(module))
        return known is None or known[0]() is not module

    def _add_root(self, root: torch.nn.Module) -> None:
        self._roots[self._root_count] = weakref.ref(root)
        self.root_ids[id(root)] = self._root_count
        self._walk(self._root_count, root)
        self._root_count += 1

    def _walk_roots(self) -> None:
        for number, reference in list(self._roots.items()):
            root = reference()
            if root is None:
                del self._roots[number]
                for key in [key for key, root in self.root_ids.items() if root == number]:
                    del self.root_ids[key]
            else:
                self._walk(number, root)

    def _walk(self, root_number: int, root: torch.nn.Module) -> None:
        """Numbers the new modules of a model; a module used in two places is named after the first."""
        for name, module, parent in named_modules_of(root):
            if self._is_new(module):
                self._add(root_number, name, module, self.find(parent))

    def _add(self, root_number: int, name: str, module: torch.nn.Module, parent: int) -> None:
        own = [(key, parameter) for key, parameter in module._parameters.items() if parameter is not None]
        own_bytes = parameter_bytes_of(module)
        record = [root_number, name, type(module).__name__, parent, own_bytes]
        number = self._log.intern("modules", self._met, record)
        self._met += 1
        self._places.append((root_number, name, type(module).__name__))
        self._named[root_number, name] = number
        self._own_bytes[number] = own_bytes
        self.holders += bool(own or module._buffers)
        self._numbers[id(module)] = (weakref.ref(module), number)
        for key, parameter in own:
            qualified = f"{name}.{key}" if name else key
            self._parameters[id(parameter)] = (weakref.ref(parameter), qualified, number)


def _outer_first(roots: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Returns models in the order in which they are named: of those that share modules, the one with most first.

    A model may take over the layers of another that the job keeps, but no longer calls: they are named as layers of the
    former.
    """
    inside = [set(map(id, modules_of(root))) for root in roots]
    held = Counter(itertools.chain.from_iterable(inside))
    shares = [any(held[each] > 1 for each in own) for own in inside]
    order = sorted(range(len(roots)), key=lambda row: (not shares[row], -len(inside[row]) if shares[row] else 0))
    return [roots[row] for row in order]
