"""Hooks before and after every optimizer update, and updates that are part of another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

#: Called with the optimizer and the arguments of its step.
Hook = Callable[[Any, Any, Any], None]
#: Code of torch's function around a step, which runs its hooks.
_HOOKED = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__
#: Optimizers that are updating one parameter, by identity.
_updating: set[int] = set()


class UpdateHooks:
    """A hook before and one after every update of every optimizer; steps within steps are part of those.

    torch iterates over its table of hooks while calling them, and changing the table meanwhile ends the job with
    "OrderedDict mutated during iteration", unless the iteration has reached the last hook. So hooks removed from inside
    one that is not the last do nothing from then on, and leave the table at the next update, when a hook of the
    optimizer's own is called before torch begins to iterate.
    """

    def __init__(self, before: Hook | None, after: Hook) -> None:
        """Stores the callbacks; nothing is called before `install`.

        Args:
            before: Called before an update; None for nothing.
            after: Called after an update.
        """
        self._before, self._after = before, after
        self._pre: Any = None
        self._post: Any = None
        self._updating: Any = None  # the optimizer whose hooks torch is iterating over
        self._open: dict[int, int] = {}  # steps that have begun and not ended, by identity of their optimizer
        self._is_in_pre = False

    def install(self) -> None:
        """Installs the hooks, behind all others."""
        self._pre = None if self._before is None else register_optimizer_step_pre_hook(self._call_before)
        self._post = register_optimizer_step_post_hook(self._call_after)

    def remove(self) -> None:
        """Removes the hooks: they are no longer called."""
        handles = [handle for handle in (self._pre, self._post) if handle is not None]
        walked = self._pre if self._is_in_pre else self._post
        self._pre = self._post = None
        self._before, self._after = None, _do_nothing  # their owner may be freed
        for handle in handles:
            if self._updating is not None and handle is walked and not _is_last(handle):
                _at_next_update(self._updating, handle.remove)
            else:
                handle.remove()

    def is_last(self) -> bool:
        """Whether no other hook is called after this update, so that hooks may be added and removed.

        Otherwise the hook after updates is moved to the end at the next one.
        """
        if _is_last(self._post):
            return True
        if self._updating is None:  # another thread's update has ended meanwhile
            return False
        _at_next_update(self._updating, self._move_back)
        return False

    def is_nested(self) -> bool:
        """Whether the update that has called a hook is part of another optimizer's, whose hooks follow."""
        hooked = 0
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            hooked += frame.f_code is _HOOKED
            frame = frame.f_back
        return hooked > 1

    def _move_back(self) -> None:
        if self._post is not None:
            self._post.remove()
            self._post = register_optimizer_step_post_hook(self._call_after)

    def _call_before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._pre is None or self._before is None or self._begins_inside(optimizer):
            return
        self._updating, self._is_in_pre = optimizer, True
        try:
            self._before(optimizer, args, kwargs)
        finally:
            self._updating, self._is_in_pre = None, False

    def _call_after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._post is None or self._ends_inside(optimizer):
            return
        self._updating = optimizer
        try:
            self._after(optimizer, args, kwargs)
        finally:
            self._updating = None

    def _begins_inside(self, optimizer: Any) -> bool:
        """Returns whether a step begins within another of the same optimizer.

        The stack, which takes time to walk, is read only if there may be one; it may also have raised.
        """
        key = id(optimizer)
        is_inside = (key in self._open or is_part(optimizer)) and is_inner_step(optimizer)
        self._open[key] = self._open[key] + 1 if is_inside and key in self._open else 1
        return is_inside

    def _ends_inside(self, optimizer: Any) -> bool:
        """Returns whether the step that ends is within another of the same optimizer."""
        key = id(optimizer)
        begun = self._open.pop(key, 0)
        if (begun == 1 and not is_part(optimizer)) or not is_inner_step(optimizer):
            return False
        if begun > 1:
            self._open[key] = begun - 1
        return True


def _do_nothing(*_: Any) -> None:
    pass


def _is_last(handle: Any) -> bool:
    table = handle.hooks_dict_ref()
    return table is None or next(reversed(table), None) == handle.id


def _at_next_update(optimizer: torch.optim.Optimizer, action: Callable[[], None]) -> None:
    """Runs an action after the optimizer's next update, before torch iterates over the global hooks."""

    def act(*_: Any) -> None:
        if not done:
            done.append(True)
            action()
            if _is_last(handle):  # otherwise it stays in the optimizer's own table as a no-op
                handle.remove()

    done: list[bool] = []
    handle = optimizer.register_step_post_hook(act)


def is_inner_step(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the hook that calls this is that of a step within another step of the same optimizer.

    torch puts the hooks around the step of a class when its first instance is made. Where that was done for AdamW, and
    then for a subclass whose step calls ``super().step()``, each step runs them twice: the outer ones count.
    """
    if is_part(optimizer):
        return True
    hooked = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and hooked < 2:
        hooked += frame.f_code is _HOOKED and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return hooked == 2


def is_part(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer makes a part of an update, outside of its step."""
    return id(optimizer) in _updating


@contextmanager
def inner_steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Has all steps of an optimizer be inner ones: parts of an update that a plan makes outside of its step."""
    _updating.add(id(optimizer))
    try:
        yield
    finally:
        _updating.discard(id(optimizer))
