"""Finds what keeps tensors alive: the chain of Python references from a variable down to each of some tensors."""

from __future__ import annotations

import functools
import gc
import math
import re
import sys
import time
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from memprof.recorder.memory.live_objects import find_referrers
from memprof.recorder.memory.references import (
    Variable,
    cycle_above,
    global_variable,
    local_variable,
    read_locals,
    running_frames,
)

#: Keys that are shown.
_NAME = re.compile(r"[\w.]{1,60}", re.ASCII)
#: References between a variable and a tensor; longer chains are not followed.
_DEPTH = 14
#: Objects followed at a time.
_MOST_OBJECTS = 4_000
_LONGEST_TEXT = 200

_LRU_CACHE = type(functools.lru_cache(lambda: None))
#: Modules whose variables are searched, by their exact type: lazy ones of libraries load themselves when touched.
_MODULES = (types.ModuleType,)


@dataclass(frozen=True)
class Holder:
    """What keeps a tensor alive.

    Attributes:
        kind: ``global``, ``local``, ``class``, ``closure``, ``exception``, ``cache``, ``ring``, ``optimizer``,
            ``cycle`` or ``unknown``.
        chain: The references, such as ``trainer.history['loss'][3]``; of a cycle, from the type of one of its objects.
        container: Type of the object that the variable refers to.
        variable: The variable; None if no chain was found.
    """

    kind: str
    chain: str
    container: str
    variable: Variable | None


@dataclass
class _Search:
    """A search backwards from tensors, all at once: each round is one pass over the collector's objects.

    Attributes:
        below: For an object and a tensor reached from it, the next object of the chain.
        found: The variable of each tensor, with the object it refers to.
        seen: The objects that were followed, by identity.
        is_complete: Whether all references were followed.
    """

    modules: dict[int, str]
    local: dict[int, Variable]
    below: dict[tuple[int, int], Any] = field(default_factory=dict)
    found: dict[int, tuple[Variable, Any]] = field(default_factory=dict)
    seen: dict[int, Any] = field(default_factory=dict)
    is_complete: bool = True


def find_holders(
    tensors: list[torch.Tensor], *, seconds: float = math.inf, ignored: Iterable[Any] = ()
) -> list[Holder]:
    """Returns what keeps each tensor alive.

    Nothing is kept alive: all references of the search are gone when it returns. Finalizers and properties of the job
    are not run, attributes are read from dictionaries.

    Args:
        tensors: The tensors.
        seconds: Processor time after which references are followed no further; the longest chains then stay unknown.
        ignored: The caller's own containers, which refer to the tensors.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return _find(tensors, time.thread_time() + seconds, {id(one) for one in ignored})
    finally:
        if collects:
            gc.enable()


def _find(tensors: list[torch.Tensor], until: float, ignored: set[int]) -> list[Holder]:
    search = _Search(
        modules={id(vars(module)): name for name, module in list(sys.modules.items()) if type(module) in _MODULES},
        local={},
    )
    for frame in running_frames():
        search.modules.setdefault(id(frame.f_globals), str(frame.f_globals.get("__name__", "")))  # run by runpy or exec
        for name, value in read_locals(frame).items():
            search.local.setdefault(value, local_variable(frame, name))
    own = {id(one) for one in (tensors, search.below, search.found, search.local, search.modules, search.seen)}
    own |= ignored
    reached: dict[int, set[int]] = {id(tensor): {id(tensor)} for tensor in tensors}
    frontier: list[Any] = list(tensors)
    for _ in range(_DEPTH):
        frontier = _round(search, frontier, reached, own)
        if not frontier or time.thread_time() > until:
            break
    search.is_complete &= not frontier
    # Before names are read, which may give objects their dictionaries.
    counted = Counter([*search.seen, *map(id, search.below.values())])
    cycles = [_cycle(search, tensor, counted) for tensor in tensors]
    return [_holder(search, tensor, cycle) for tensor, cycle in zip(tensors, cycles, strict=True)]


def _round(search: _Search, frontier: list[Any], reached: dict[int, set[int]], own: set[int]) -> list[Any]:
    """Follows the references to some objects one step back; returns those of the referrers that are not variables."""
    here = {id(one): one for one in frontier}
    for number, one in here.items():
        variable = search.local.get(number)
        if variable is not None:
            for target in reached[number]:
                search.found.setdefault(target, (variable, one))
    wanted = [one for one in frontier if not all(target in search.found for target in reached[id(one)])]
    if not wanted:
        return []
    referrers = find_referrers(wanted)
    own |= {id(frontier), id(wanted), id(referrers), id(here), id(reached)}
    following: list[Any] = []
    added: set[int] = set()
    for referrer in referrers:
        number = id(referrer)
        if number in own or _is(referrer, types.ModuleType) or _is_own_frame(referrer):
            continue
        module = search.modules.get(number)
        for child in gc.get_referents(referrer):
            if id(child) not in here or child is referrer:
                continue
            targets = reached[id(child)]
            if module is not None:
                _found_global(search, module, referrer, child, targets)
                continue
            if _is(referrer, type):
                variable = Variable("class", referrer.__qualname__, "", 0, "")
                for target in targets:
                    search.below.setdefault((number, target), child)
                    search.found.setdefault(target, (variable, referrer))
                continue
            fresh = [target for target in targets if (number, target) not in search.below]
            for target in fresh:
                search.below[number, target] = child
            if fresh:  # also where other tensors have led here before
                if number not in added:
                    added.add(number)
                    following.append(referrer)
                reached.setdefault(number, set()).update(fresh)
    del referrers
    search.is_complete &= len(following) <= _MOST_OBJECTS
    search.seen.update((id(one), one) for one in following)
    return following[:_MOST_OBJECTS]


def _found_global(search: _Search, module: str, names: dict[str, Any], child: Any, targets: Iterable[int]) -> None:
    if module.partition(".")[0] == "memprof":
        return
    missing = [target for target in targets if target not in search.found]
    name = next((name for name, value in list(names.items()) if value is child), None) if missing else None
    if name is not None:
        variable = global_variable(module, name)
        for target in missing:
            search.found[target] = (variable, child)


def _is(one: Any, *kinds: type) -> bool:
    """Returns whether an object is of a type, by its type alone: isinstance would make lazy proxies load."""
    return issubclass(type(one), kinds)


def _is_own_frame(referrer: Any) -> bool:
    return type(referrer) is types.FrameType and str(referrer.f_globals.get("__name__", "")).startswith("memprof.")


def _cycle(search: _Search, tensor: torch.Tensor, counted: Counter[int]) -> Any:
    """Returns an object of the cycle that alone keeps a tensor alive; None if a variable or something unseen does."""
    if id(tensor) in search.found or not search.is_complete:
        return None
    leading = [number for number, target in search.below if target == id(tensor)]
    above = {number: search.seen[number] for number in leading if number in search.seen}
    return cycle_above(tensor, above, counted)


def _holder(search: _Search, tensor: torch.Tensor, cycle: Any) -> Holder:
    found = search.found.get(id(tensor))
    if found is not None:
        variable, one = found
        chain, kind = _chain(search, tensor, one, variable.name, variable.kind)
        return Holder(kind, chain, type(one).__name__, variable)
    if cycle is None:
        return Holder("unknown", "", "", None)
    chain, _ = _chain(search, tensor, cycle, type(cycle).__qualname__, "cycle")
    return Holder("cycle", chain, type(cycle).__name__, None)


def _chain(search: _Search, tensor: torch.Tensor, one: Any, chain: str, kind: str) -> tuple[str, str]:
    """Returns the references from an object with a name down to a tensor, and the kind of the last that tells."""
    is_attribute = False
    for _ in range(_DEPTH):
        if one is tensor:
            break
        kind = _kind(one, kind)
        child = search.below.get((id(one), id(tensor)))
        if child is None:
            break
        cell = search.below.get((id(child), id(tensor)))
        if _is(one, types.FunctionType) and child is one.__closure__ and cell is not None:
            name = next((name for name, own in _closure(one) if own is cell), "?")
            chain += f" (closure variable {name} of {one.__qualname__})"
            one = cell
            continue
        if type(child) is dict and (_is(one, type) or (type(one) is not dict and _own_dict(one) is child)):
            is_attribute = True
        else:
            chain += _attribute(one, child) if is_attribute else _step(one, child)
            is_attribute = False
        one = child
    return chain[:_LONGEST_TEXT], kind


def _kind(one: Any, kind: str) -> str:
    if _is(one, BaseException, types.TracebackType):
        return "exception"
    if _is(one, _LRU_CACHE):
        return "cache"
    if _is(one, deque) and deque.maxlen.__get__(one) is not None:
        return "ring"
    if _is(one, torch.optim.Optimizer):
        return "optimizer"
    if _is(one, types.CellType) and kind in ("global", "local", "class"):
        return "closure"
    return kind


def _own_dict(one: Any) -> dict[str, Any] | None:
    try:
        found = object.__getattribute__(one, "__dict__")
    except AttributeError:
        return None
    return found if type(found) is dict else None


def _attribute(names: dict[Any, Any], child: Any) -> str:
    return next((f".{name}" for name, value in list(names.items()) if value is child), "")


def _step(one: Any, child: Any) -> str:
    """Returns how an object refers to another, as it would be written behind the object's name."""
    if _is(one, dict):
        return next((f"[{_key(key)}]" for key, value in list(dict.items(one)) if value is child), "[key]")
    for kind in (list, tuple, deque):  # what a subclass overrides is not called
        if _is(one, kind):
            values = list(kind.__iter__(one))
            return next((f"[{place}]" for place, value in enumerate(values) if value is child), "")
    if _is(one, types.CellType):
        return ""
    if _is(one, types.FunctionType):
        return f" (globals of {one.__qualname__})" if child is one.__globals__ else f" (defaults of {one.__qualname__})"
    if _is(one, types.FrameType):
        name = next((name for name, value in read_locals(one).items() if value == id(child)), "")
        return f" (local {name} of {one.f_code.co_qualname})"
    if _is(one, BaseException):
        return ".__traceback__" if _is(child, types.TracebackType) else f".{_special(one, child)}"
    if _is(one, types.TracebackType):
        return ""
    if _is(one, types.MethodType):
        return ".__self__"
    if _is(one, _LRU_CACHE):
        return " (results of lru_cache)"
    if _is(one, types.GeneratorType, types.CoroutineType):
        return f" (inside {one.__qualname__})"
    fields = _own_dict(one) or {}
    return next((f".{name}" for name, value in list(fields.items()) if value is child), f".<{type(one).__name__}>")


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    return zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)


def _special(one: BaseException, child: Any) -> str:
    names = ("__context__", "__cause__", "args")
    return next((name for name in names if getattr(BaseException, name).__get__(one) is child), "<attribute>")


def _key(key: Any) -> str:
    """Returns a key as it would be written; a text that is no name may be private."""
    if type(key) is str:
        return repr(key) if _NAME.fullmatch(key) else "'…'"
    return str(key) if type(key) is int else f"<{type(key).__name__}>"
