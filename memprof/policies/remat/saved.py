"""Replaces autograd's saved tensors by handles, and names them for plans."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections import Counter as Counts
from collections.abc import Callable
from sys import getrefcount
from typing import Any

import torch

from memprof.errors import PolicyError
from memprof.policies.evict.planned import key_of
from memprof.policies.remat.cells import Cell, Ref
from memprof.policies.remat.memory import Memory
from memprof.policies.remat.recomputation import Recomputation
from memprof.policies.runtime.job import Job
from memprof.policies.runtime.job_traits import as_if_allowed, step_aside_where_forbidden, take_all_hooks
from memprof.policies.swap.packing import Left, Version, is_plain
from memprof.recorder.calls.torch_state import untraced

_tracing_state = torch._C._get_tracing_state
#: Whether torch reports a tensor's references; where it does not, backward and each handle get a tensor of their own.
can_count_uses = hasattr(torch.Tensor, "_use_count")
#: Python references to a view that is used nowhere else: the handle's, its version's, and two while they are counted.
_OWN_REFERENCES = 4


class Handle:
    """Stands in autograd for a saved tensor that may be dropped; until then it holds a view, as autograd would."""

    __slots__ = ("__weakref__", "_cell", "_hooks", "_layout", "_version", "_view")

    def __init__(self, hooks: SavedHooks, cell: Cell, tensor: torch.Tensor) -> None:
        self._hooks = hooks
        self._cell = cell
        self._layout: Ref | None = None  # once the view is released
        if not (tensor.is_leaf and can_count_uses):  # the node of another may save this tensor: a reference cycle
            with torch._C._DisableTorchDispatch():
                tensor = tensor.detach()
        self._view: torch.Tensor | None = tensor
        self._version = Version(tensor, keeps_memory=True)
        cell.views += 1
        cell.handles.append(weakref.ref(self))

    def unpack(self) -> torch.Tensor:
        """Returns the tensor.

        Raises:
            RuntimeError: It was changed in place since; same message as PyTorch's without hooks.
        """
        self._version.check()
        cell = self._cell.latest()
        self._hooks.used(cell)
        if self._view is not None:
            if can_count_uses:
                return self._view
            with torch._C._DisableTorchDispatch():
                return self._view.detach()
        assert self._layout is not None
        return self._layout.view(self._hooks.restore(cell))

    def is_lent(self) -> bool:
        """Returns whether backward or the job, which can read it from the graph, is using the view."""
        view = self._view
        if view is None or not can_count_uses:
            return False
        return view._use_count() > 1 or getrefcount(view) > _OWN_REFERENCES  # type: ignore[attr-defined]

    def let_go(self) -> None:
        """Releases the storage and keeps the tensor's version; call it with torch's dispatch disabled."""
        if self._view is not None:
            self._layout = Ref(self._view)
            self._view.data = torch.empty(0, device=self._view.device)
            self._view = None

    def __del__(self) -> None:
        hooks = getattr(self, "_hooks", None)
        if hooks is not None:
            cell = self._cell.latest()
            if self._view is not None:
                self._view = self._version = None  # type: ignore[assignment]  # before the release is noticed
                cell.views -= 1
            hooks.release(cell)


class SavedHooks:
    """The pair of saved tensor hooks, below any that the job installs itself."""

    def __init__(self, memory: Memory, recomputation: Recomputation, keys: Keys | None) -> None:
        self._memory = memory
        self.restore, self.release = recomputation.restore, memory.release
        self._keys = keys
        self._functions = FunctionCalls()

    def pack(self, tensor: torch.Tensor) -> Handle | Left:
        """Packs a tensor that autograd saves."""
        # Tensors saved by an autograd.Function are kept: its author may use them as no operator does.
        if _tracing_state() is not None:  # torch.jit.trace's tensors are kept
            with untraced(), torch._C._DisableTorchDispatch():
                return Left(tensor)
        if not self._functions.saves() and is_plain(tensor):
            storage = tensor.untyped_storage()
            cell = self._memory.find(storage)
            if cell is not None and cell.recipe is not None and cell.recipe.can_repeat and cell.size_bytes:
                handle = Handle(self, cell, tensor)
                self._memory.save(cell, storage)
                if self._keys is not None:
                    self._keys.decide(cell)
                return handle
        with torch._C._DisableTorchDispatch():
            return Left(tensor)

    def unpack(self, packed: Handle | Left) -> torch.Tensor:
        """Returns the saved tensor to autograd."""
        with untraced():
            return packed.unpack()

    def used(self, cell: Cell) -> None:
        """Records that backward is about to read a cell."""
        cell.used_us = self._memory.clock_us
        if self._memory.schedule.observation is not None:
            self._memory.schedule.observation.read(cell)

    def slide_in(self) -> None:
        """Inserts the hooks below all active ones."""
        self._functions.begin()
        step_aside_where_forbidden()
        with as_if_allowed():
            above = take_all_hooks()
            torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
            for pair in above:
                torch._C._autograd._push_saved_tensors_default_hooks(*pair)

    def slide_out(self) -> None:
        """Removes the hooks, leaving all others in order."""
        self._functions.end()
        with as_if_allowed():
            for pair in take_all_hooks():
                if pair[0] != self.pack:
                    torch._C._autograd._push_saved_tensors_default_hooks(*pair)


_Function: Any = torch.autograd.Function
#: The frame that calls a function and saves its tensors, up to torch 2.13; since then it is C++, without a frame.
_FRAME = getattr(getattr(_Function.apply, "__func__", None), "__code__", None)
#: torch's own function, while calls are followed.
_replaced: list[Any] = []


class FunctionCalls(threading.local):
    """Whether a custom autograd function is being called in this thread.

    Attributes:
        depth: How many are, one inside another.
    """

    depth = 0

    def begin(self) -> None:
        """Follows the calls of every function from now on, where no frame shows them."""
        if _FRAME is not None:
            return
        before, calls = vars(_Function)["apply"], self

        def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
            calls.depth += 1
            try:
                return before.__get__(None, kind)(*args, **kwargs)
            finally:
                calls.depth -= 1

        _replaced.append(before)
        _Function.apply = classmethod(apply)

    def end(self) -> None:
        """Stops following."""
        if _FRAME is None:
            _Function.apply = _replaced.pop()

    def saves(self) -> bool:
        """Returns whether the hook that calls this packs a tensor of a function, whose operators save none."""
        return self.depth > 0 or (_FRAME is not None and sys._getframe(2).f_code is _FRAME)


class Keys:
    """Decides by name whether a saved tensor is kept, or dropped once nothing else references it.

    Runs are counted from the model's call on, per module, so keys do not change if a model calls its modules in another
    order.
    """

    def __init__(self, memory: Memory, recompute: tuple[str, ...]) -> None:
        self._memory = memory
        self._dropped = frozenset(recompute)
        self._modules = [""]
        self._counts: Counts[tuple[str, str]] = Counts()
        self.found: set[str] = set()

    def install(self, job: Job) -> None:
        """Tracks which module of a job is running.

        Raises:
            PolicyError: A key names a module that the model does not have: the plan is for another model.
        """
        modules = job.modules_named()
        unknown = sorted({key.partition(":")[0] for key in self._dropped} - set(modules))
        if unknown:
            raise PolicyError(
                f"the plan was made for another model: it recomputes tensors of {unknown[0]!r}, and this model has no "
                "such module. Create a new plan from a recording of this one."
            )
        for name, module in modules.items():
            if type(module).forward is not torch.nn.Module.forward:
                job.wrap_forward(module, functools.partial(self._following, name))

    def name(self, operator_name: str) -> str:
        """Returns the key of an operator's run, and counts the run."""
        module = self._modules[-1]
        number = self._counts[module, operator_name]
        self._counts[module, operator_name] = number + 1
        return key_of(module, operator_name, number)

    def decide(self, cell: Cell) -> None:
        """Marks a newly saved tensor for dropping if the plan names it."""
        key = cell.recipe.key if cell.recipe is not None else ""
        if key in self._dropped:
            self.found.add(key)
            self._memory.due.append(cell)
        elif not self._memory.budget_bytes:
            cell.is_kept = True

    def _following(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def following(*args: Any, **kwargs: Any) -> Any:
            if len(self._modules) == 1 and not self._memory.saved:
                self._counts.clear()
            self._modules.append(name)
            try:
                return forward(*args, **kwargs)
            finally:
                self._modules.pop()

        return following
