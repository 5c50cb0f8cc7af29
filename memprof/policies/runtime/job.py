"""The training job that policies modify: its model, its optimizers, the changes to them, and what is kept of each."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from memprof.errors import NoOptimizerError
from memprof.policies.runtime.copies import CopyGuard
from memprof.policies.runtime.forwards import PlannedForward
from memprof.policies.runtime.model_names import is_compiled_as_whole, unwrapped

#: Objects that hold values of the job and that scripts copy and save.
Owner = torch.nn.Module | torch.optim.Optimizer

#: Returns the context for the update of one parameter.
Around = Callable[[torch.Tensor], AbstractContextManager[None]]

#: Returns the context for a use of parameters.
AroundUses = Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]]

#: Note for the user when a model under a plan is copied or saved.
COPIED = (
    "Copies of the model, and files that it is saved to as a whole, have their own weights and run without the plan: "
    "apply the plan to copies that are trained, too."
)


@dataclass
class Effect:
    """What a policy must do in a job at least once; otherwise it changes nothing.

    Attributes:
        without: Sentence on the policy if it has not done so.
        is_tried: Whether it would have by now: a chosen module was called.
        is_done: Whether it has.
    """

    without: str
    is_tried: bool = False
    is_done: bool = False


class Job:
    """The job a plan is applied to.

    Attributes:
        model: The root module, without wrappers.
        is_compiled: Whether torch.compile wraps it.
        optimizers: The optimizers of its parameters, possibly none yet.
        notes: Notes for the user on what was changed or skipped.
        on_note: Called with each note that ``note`` adds.
        effects: What its policies must do to have an effect; holds nothing of the job.
    """

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Takes the model, possibly wrapped, and its optimizers; changes nothing."""
        self.model: torch.nn.Module = unwrapped(model)
        self.is_compiled = is_compiled_as_whole(model)
        self.optimizers = list(optimizers)
        self.notes: list[str] = []
        self.on_note: Callable[[str], Any] | None = None
        self.effects: list[Effect] = []
        self._around_updates: list[tuple[torch.optim.Optimizer | None, Around]] = []
        self._around_uses: list[AroundUses] = []
        self._guards: dict[int, CopyGuard] = {}
        self._undo = ExitStack()

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter or buffer; cpu where it has neither."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            with torch._C.DisableTorchFunction():  # otherwise a mode or a subclass of the job observes this access
                return tensor.device
        return torch.device("cpu")

    @property
    def has_parts(self) -> bool:
        """Whether this process holds parts of the parameters, as DTensors: shard in stages 2 and 3."""
        return any(kind.__name__ == "DTensor" for each in self.model.parameters() for kind in type(each).__mro__)

    @property
    def averages(self) -> bool:
        """Whether shard changes complete gradients, as it does in stages 0 and 1."""
        averaging = "memprof.policies.shard.averaging"
        return any(
            type(getattr(hook, "__self__", None)).__module__ == averaging
            for each in self.model.parameters()
            for hook in (getattr(each, "_post_accumulate_grad_hooks", None) or {}).values()
        )

    def require_optimizer(self, policy: str) -> None:
        """Checks that an optimizer is known.

        Raises:
            NoOptimizerError: The job has none.
        """
        if not self.optimizers:
            raise NoOptimizerError(
                f"{policy} needs an optimizer of the model's parameters, and none existed when the model was "
                "called. Create it earlier, pass it to memprof.apply(plan, model, optimizer), or leave the policy "
                "out if the script updates the weights itself."
            )

    def modules_named(self) -> dict[str, torch.nn.Module]:
        """Returns every module by its qualified name, the root as "", as in named_modules()."""
        return dict(self.model.named_modules())

    def on_undo(self, action: Callable[[], Any]) -> None:
        """Registers an undo action."""
        self._undo.callback(action)

    def undo(self) -> None:
        """Reverts every change, last one first."""
        self._undo.close()

    def wrap_forward(
        self,
        module: torch.nn.Module,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
        *,
        innermost: bool = False,
        in_export: bool = False,
    ) -> None:
        """Wraps a module's forward; wrappers nest, the last one is the outermost.

        Copies of the module, files it is saved in and replicas have the job's own forward.

        Args:
            module: The module.
            wrap: Given the forward as it is, returns the new one.
            innermost: Wrap the job's own forward, inside all other wrappers.
            in_export: Have torch.export trace the wrapper: the model does not run without.
        """
        self.guard(module)
        self.on_undo(PlannedForward.add(module, wrap, innermost=innermost, in_export=in_export))

    def guard(self, owner: Owner) -> CopyGuard:
        """Returns the guard that keeps this job's changes of a module or an optimizer out of its copies and files."""
        if id(owner) not in self._guards:
            guard = self._guards[id(owner)] = CopyGuard.of(owner)
            guard.after.append(self._note_copy)
            self.on_undo(lambda: self._release(guard))
        return self._guards[id(owner)]

    def change_copies(self, owner: Owner, change: Callable[[dict[str, Any]], None]) -> None:
        """Changes the state in copies of a module or an optimizer, and in the files it is saved in.

        Args:
            owner: The module or the optimizer.
            change: Changes the state of a copy, a dict that is the copy's own.
        """
        changes = self.guard(owner).changes
        changes.append(change)
        self.on_undo(partial(changes.remove, change))

    def put_around_updates(self, optimizer: torch.optim.Optimizer | None, around: Around) -> None:
        """Registers a context for updates of single parameters outside ``step``.

        Args:
            optimizer: The optimizer that updates the parameter; None for any.
            around: Given the parameter, returns the context of its update.
        """
        self._around_updates.append((optimizer, around))

    @contextmanager
    def around_update(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> Iterator[None]:
        """Enters the registered contexts around the update of a single parameter."""
        with ExitStack() as stack:
            for owner, around in self._around_updates:
                if owner is None or owner is optimizer:
                    stack.enter_context(around(parameter))
            yield

    def put_around_uses(self, around: AroundUses) -> None:
        """Registers a context for uses of parameters outside their module's forward.

        Args:
            around: Given the tensors that are used, returns the context.
        """
        self._around_uses.append(around)

    @contextmanager
    def around_uses(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Enters the registered contexts around a use of parameters that a policy has put off."""
        with ExitStack() as stack:
            for around in self._around_uses:
                stack.enter_context(around(tensors))
            yield

    def expect(self, policy: str, without: str) -> Effect:
        """Registers what a policy must do to have an effect."""
        self.effects.append(Effect(f"{policy} had no effect: {without}"))
        return self.effects[-1]

    def note(self, sentence: str) -> None:
        """Adds a note for the user, once; recordings in progress also report it."""
        if sentence not in self.notes:
            self.notes.append(sentence)
            if self.on_note is not None:
                self.on_note(sentence)

    def _note_copy(self) -> None:
        self.note(COPIED)

    def _release(self, guard: CopyGuard) -> None:
        del self._guards[id(guard.owner)]
        guard.after.remove(self._note_copy)
        guard.release()


class _OfOptimizer(Protocol):
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...


Kept = TypeVar("Kept", bound=_OfOptimizer)


class PerOptimizer(Generic[Kept]):
    """The objects that one policy has made for optimizers, until the job that made them is undone or gone."""

    def __init__(self) -> None:
        self._kept: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()

    def get(self, optimizer: torch.optim.Optimizer) -> Kept | None:
        """Returns what is kept of an optimizer, None if nothing."""
        kept = self._kept.get(id(optimizer))
        return kept if kept is not None and kept.optimizer is optimizer else None

    def keep(self, job: Job, kept: Kept) -> None:
        """Keeps an object for the other jobs of its optimizer."""
        key = id(kept.optimizer)
        self._kept[key] = kept
        job.on_undo(partial(self._kept.pop, key, None))
