"""The models of a running job, and which of their modules match a plan's patterns, by the names of a recording."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from memprof.errors import PolicyError
from memprof.policies.plan.patterns import match_modules
from memprof.policies.runtime.model_names import unwrapped
from memprof.recorder.memory.live_objects import outermost_modules
from memprof.recorder.memory.tensor_memory import modules_of, named_modules_of, parameters_of


@dataclass(frozen=True)
class CalledModel:
    """A model that is called, and its position in the module that contains it.

    Attributes:
        called: The module that is called.
        top: The outermost module that contains it, often itself.
        place: Its qualified name there, "" if it is the outermost one.
        title: Prefix of the names in ``top`` in a recording of several models: its type, numbered.
    """

    called: torch.nn.Module
    top: torch.nn.Module
    place: str
    title: str

    def holds(self, pattern: str) -> bool:
        """Whether a pattern matches anything in the outermost module, called or not."""
        names = module_names(self.top)
        prefixes = ("", self.title)
        found = any(_match(pattern, _names_under(prefix, names, pattern)) for prefix in prefixes)
        return found or self.find(pattern) is not None

    def trains(self, pattern: str) -> bool:
        """Whether a pattern matches a module with trained parameters in the outermost module, by its name there."""
        names = [name for name, module, _ in named_modules_of(self.top) if is_trained(module)]
        return any(_match(pattern, _names_under(prefix, names, pattern)) for prefix in ("", self.title))

    def find(self, pattern: str) -> list[str] | None:
        """Finds the modules that match a pattern.

        A recording names modules relative to the outermost one, so those names come first: if ``agent.act`` calls
        ``agent.actor``, ``*`` matches the actor and not each of its layers.

        Returns:
            None if none matches; an empty list if the pattern matches as written; otherwise the names of modules that
            match under a recording's names (``Generator.layers.*`` in a job with several models).
        """
        names = module_names(unwrapped(self.called))
        wrappers = ("module", "_orig_mod", "module._orig_mod", "_orig_mod.module")
        for prefix in dict.fromkeys((self.place, "", self.title, _joined(self.title, self.place), *wrappers)):
            full = _names_under(prefix, names, pattern, holds_itself=prefix == self.place)
            found = _match(pattern, full)
            if found:
                return [full[name] for name in found] if prefix else []
        return None


def called_models(called: torch.nn.Module) -> Iterator[CalledModel]:
    """Yields the called model, then every other live model with parameters; frozen ones come last."""
    tops = outermost_modules()
    if all(module is not called for top in tops for module in modules_of(top)):
        # Modules that contain one another have no outermost one.
        yield CalledModel(called, called, "", type(called).__name__)
    numbers: dict[str, int] = {}
    others, frozen = [], []
    for top in tops:
        kind = type(top).__name__
        numbers[kind] = numbers.get(kind, 0) + 1
        # As the trace names them: the type, numbered from its second instance on.
        title = kind if numbers[kind] == 1 else f"{kind}#{numbers[kind]}"
        place = next((name for name, module, _ in named_modules_of(top) if module is called), None)
        if place is not None:
            yield CalledModel(called, top, place, title)
        elif is_trained(top):
            others.append(CalledModel(top, top, "", title))
        elif next(parameters_of(top), None) is not None:
            frozen.append(CalledModel(top, top, "", title))
    yield from others
    yield from frozen


def module_names(module: torch.nn.Module) -> list[str]:
    """Returns the qualified names of a module and all modules in it."""
    return [name for name, _, _ in named_modules_of(module)]


def _names_under(prefix: str, names: Iterable[str], pattern: str, *, holds_itself: bool = False) -> dict[str, str]:
    """Returns modules by their names under a prefix, "." for the model itself.

    Under its type as prefix, the model itself has a name that wildcards must not match; inside another module,
    wildcards may match it (``holds_itself``).
    """
    is_named = holds_itself or not prefix or "*" not in pattern
    return {_joined(prefix, name): name or "." for name in names if name or is_named}


def _match(pattern: str, names: Iterable[str]) -> list[str]:
    try:
        return match_modules([pattern], names)
    except PolicyError:
        return []


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def is_trained(module: torch.nn.Module) -> bool:
    """Returns whether any parameter of a module requires gradients."""
    with torch._C.DisableTorchFunction():  # otherwise the job's torch function modes or subclasses would see this read
        return any(parameter.requires_grad for parameter in parameters_of(module))
