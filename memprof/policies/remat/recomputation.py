"""Recomputes dropped contents: inputs first, with room made for each and the random generators as they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memprof.policies.remat.cells import Cell, Recipe, arguments_of, copied
from memprof.policies.remat.memory import Memory
from memprof.recorder.calls import operator_traits

_LISTS = (list, tuple)
_use_count = torch._C._storage_Use_Count
_keys = torch._C.DispatchKey
_AUTOCAST = torch._C.DispatchKeySet(_keys.AutocastCPU) | torch._C.DispatchKeySet(_keys.AutocastCUDA)


class Recomputation:
    """Runs recipes again.

    Attributes:
        is_running: Whether an operator is being recomputed; nothing is recorded of it.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.is_running = False

    def restore(self, cell: Cell) -> torch.UntypedStorage:
        """Returns a storage with a cell's content, copied back or recomputed if it is gone.

        Raises:
            PolicyError: It does not fit.
        """
        storage = cell.storage()
        if storage is None:
            if cell.place is not None:
                storage = self._memory.fetch(cell)
            else:
                self._make(cell)
                storage = cell.hold
                assert storage is not None
        cell.used_us = self._memory.clock_us
        return storage

    def _make(self, target: Cell) -> None:
        """Runs the missing recipes depth first, without Python's own stack: chains may be thousands long."""
        stack: list[Recipe] = []
        target.locks += 1
        try:
            self._push(stack, target)
            while stack:
                recipe = stack[-1]
                missing = next((cell for cell in recipe.inputs if not cell.is_there()), None)
                if missing is None:
                    self._repeat(recipe)
                    self._unlock(stack.pop())
                elif missing.place is not None:
                    self._memory.fetch(missing)
                else:
                    self._push(stack, missing)
        finally:
            while stack:  # an operator failed: the job gets its error, and all locks are released
                self._unlock(stack.pop())
            target.locks -= 1

    def _push(self, stack: list[Recipe], cell: Cell) -> None:
        recipe = cell.recipe
        if recipe is None or not recipe.can_repeat:
            raise RuntimeError("remat cannot recompute a saved tensor: internal error in memprof, not in your job.")
        for each in recipe.inputs:
            each.locks += 1
        stack.append(recipe)

    def _unlock(self, recipe: Recipe) -> None:
        """Unlocks a recipe's inputs; frees those recomputed only for it."""
        for cell in recipe.inputs:
            cell.locks -= 1
            if not cell.locks and not cell.saved and cell.hold is not None:
                cell.hold = None

    def _repeat(self, recipe: Recipe) -> None:
        memory = self._memory
        # Held from here on, because other references to an input may be dropped while room is made.
        storages: dict[Cell, torch.UntypedStorage] = {}
        for cell in recipe.inputs:
            storage = cell.storage()
            assert storage is not None
            storages[cell] = storage
        name = f"recomputing {recipe.function}"
        taken = recipe.changes
        if taken is not None and (taken.locks > recipe.inputs.count(taken) or taken.saved or not _is_only_ours(taken)):
            memory.make_room(taken.size_bytes, name)
            storages[taken] = copied(storages[taken])
        elif taken is not None:
            taken.hold = taken.original = None  # the operator changes it in place: the old content is gone
        memory.make_room(max(recipe.need.highest_bytes, 0), name, is_exact=recipe.need.is_measured)
        args, kwargs = arguments_of(recipe, storages)
        result = self._run(recipe, args, kwargs)
        memory.ran_again(recipe.need.least_us)
        results = result if type(result) in _LISTS else [result]
        for output in recipe.outputs:
            made = output()
            if made is None or made.is_there() or not (made.locks or made.saved):
                continue
            storage = storages[taken] if taken is not None else results[made.number].untyped_storage()
            if storage.nbytes() != made.size_bytes:
                raise RuntimeError(
                    f"{recipe.function} returned {made.size_bytes:,} bytes the first time and {storage.nbytes():,} "
                    "now: it depends on more than its arguments. Exclude it from recomputation: run it under "
                    "torch.no_grad() or in an autograd.Function."
                )
            memory.adopt(made, storage)

    def _run(self, recipe: Recipe, args: Any, kwargs: Any) -> Any:
        """Runs an operator as in its first run, for its values only."""
        had_gradients = torch.is_grad_enabled()
        before = operator_traits.begin(recipe.sequence)
        was_running, self.is_running = self.is_running, True
        try:
            with (
                torch._C._AutoDispatchBelowAutograd(),
                torch._C._ExcludeDispatchKeyGuard(_AUTOCAST),
                restored(recipe.random),
            ):
                torch._C._set_grad_enabled(True)  # some kernels check the flag
                return recipe.function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(had_gradients)
            self.is_running = was_running
            operator_traits.end(before)


def _is_only_ours(cell: Cell) -> bool:
    return cell.hold is not None and _use_count(cell.hold._cdata) == 1


def states_for(kwargs: dict[str, Any] | None, device: torch.device) -> tuple[tuple[torch.Generator, bytes], ...]:
    """Returns the states of the generators that an operator may draw from.

    Args:
        kwargs: Its keyword arguments; a generator among them is the only one.
        device: The device it runs on.
    """
    own = (kwargs or {}).get("generator")
    generators = [own if own is not None else torch.default_generator]
    if own is None and device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return tuple((generator, state_of(generator)) for generator in generators)


@contextmanager
def restored(states: tuple[tuple[torch.Generator, bytes], ...] | None) -> Iterator[None]:
    """Restores states temporarily, then the previous ones."""
    before = [(generator, state_of(generator)) for generator, _ in states or ()]
    try:
        put_back(states)
        yield
    finally:
        put_back(before)


def put_back(states: Iterable[tuple[torch.Generator, bytes]] | None) -> None:
    """Restores states permanently."""
    with torch._C._DisableTorchDispatch():
        for generator, state in states or ():
            generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def state_of(generator: torch.Generator) -> bytes:
    """Returns a state as bytes, outside device memory."""
    with torch._C._DisableTorchDispatch():
        return generator.get_state().numpy().tobytes()
