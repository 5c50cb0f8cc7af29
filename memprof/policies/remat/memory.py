"""Holds the budget: knows which content is in which storage, makes room, drops, and takes what is gone from recipes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from memprof.errors import PolicyError
from memprof.policies.remat.cells import Cell, Original, Recipe, copied
from memprof.policies.remat.counters import Counter
from memprof.policies.remat.swapping import Swapping
from memprof.policies.remat.victims import Victims, may_go
from memprof.units import format_bytes

#: What is left free of every budget, for what the runtime itself takes: generators' states, numbers in tensors.
MARGIN_BYTES = 16 * 1024


def _do_nothing() -> None:
    """Stands where nobody wants to know."""


class Memory:
    """The contents of a job's storages under a budget.

    Attributes:
        budget_bytes: Most bytes that may be allocated at once; 0 where only a plan decides.
        clock_us: Summed time of the operators run.
        first_us: The same of those run for the first time since the last time that nothing was saved.
        again_us: The same of those run again.
        victims: What may be dropped.
        saved: How many tensors autograd keeps.
        dropped: How many cells were dropped so far.
        due: Cells that are to be dropped as soon as nobody else holds them.
        warn_factor: From this multiple of ``first_us`` on, ``again_us`` is worth a warning.
        on_thrash: Called then.
    """

    def __init__(self, counter: Counter, budget_bytes: int, heuristic: str, swapping: Swapping | None) -> None:
        """Knows nothing yet.

        Args:
            counter: Counts the bytes allocated.
            budget_bytes: Most bytes at once; 0 for no bound.
            heuristic: How victims are chosen; one of HEURISTICS.
            swapping: Carries contents out of the device instead of dropping them; None where nothing is carried.
        """
        self.counter = counter
        self.budget_bytes = budget_bytes
        self.swapping = swapping
        self.victims = Victims(heuristic)
        self.clock_us = self.first_us = self.again_us = 0.0
        self.saved = 0
        self.dropped = 0
        self.due: list[Cell] = []
        self.warn_factor = 2.0
        self.on_thrash: Callable[[], None] = _do_nothing
        self._limit = max(budget_bytes - MARGIN_BYTES, 1) if budget_bytes else 1 << 62
        self._cells: dict[int, Cell] = {}
        self._on_gone = self._gone  # bound once

    # -- contents -------------------------------------------------------------------------------------------------

    def find(self, storage: torch.UntypedStorage) -> Cell | None:
        """Returns the cell whose content a storage has, None where it is not known."""
        return self._cells.get(storage._cdata)

    def meet(self, storage: torch.UntypedStorage) -> Cell:
        """Returns the cell of a storage; one that was not seen being made is one that nobody can make."""
        cell = self._cells.get(storage._cdata)
        if cell is None:
            cell = Cell(None, 0, storage.nbytes(), storage.device)
            self.place(cell, storage)
        return cell

    def place(self, cell: Cell, storage: torch.UntypedStorage) -> None:
        """Notes that a storage has the content of a cell from now on."""
        address = storage._cdata
        self._cells[address] = cell
        original = cell.original = Original(storage, self._on_gone)
        original.address = address

    def _gone(self, original: Original) -> None:
        address = original.address
        cell = self._cells.get(address)
        if cell is not None and cell.original is original:
            del self._cells[address]
            cell.original = None

    def before_write(self, storage: torch.UntypedStorage) -> None:
        """Prepares for a change in place of what nobody can make again, as long as something is made from it."""
        cell = self._cells.get(storage._cdata)
        if cell is None or cell.recipe is not None:
            return
        readers = [recipe for recipe in cell.live_readers() if recipe.can_repeat]
        if not readers:
            return
        if not self._settle(cell):
            # Something made from it is dropped: what it was is kept for that.
            self.make_room(cell.size_bytes, "a copy of what is changed in place")
            copy = copied(storage)
            for recipe in readers:
                recipe.anchors = tuple(copy if each is storage else each for each in recipe.anchors)
            del self._cells[storage._cdata]
            self.place(cell, copy)

    def changed(self, storage: torch.UntypedStorage, recipe: Recipe | None) -> Cell:
        """Notes that a storage was changed in place: it has a new content from now on.

        Args:
            storage: The storage.
            recipe: How the new content was made; None where that cannot be repeated.
        """
        before = self._cells.pop(storage._cdata, None)
        cell = Cell(recipe, 0, storage.nbytes(), storage.device)
        self.place(cell, storage)
        cell.used_us = self.clock_us
        if before is not None:
            before.original = None
            if before.hold is not None:
                self.victims.remove(before)
                before.hold = None
            if before.saved:
                # Whoever reads it by its version gets PyTorch's own error; to others the later bytes are as good.
                before.after = cell
                cell.saved, before.saved = before.saved, 0
                cell.hold = storage
                if recipe is not None:
                    self.victims.add(cell)
                else:
                    cell.is_kept = True
        return cell

    # -- what autograd keeps --------------------------------------------------------------------------------------

    def save(self, cell: Cell, storage: torch.UntypedStorage) -> None:
        """Notes that autograd saves a cell."""
        self.saved += 1
        cell.saved += 1
        cell.hold = storage
        cell.used_us = self.clock_us
        self.victims.add(cell)

    def release(self, cell: Cell) -> None:
        """Notes that autograd lets go of a cell."""
        self.saved -= 1
        cell.saved -= 1
        if not cell.saved:
            self.victims.remove(cell)
            if not cell.locks:
                cell.hold = None
            self._forget_place(cell)
        if not self.saved:
            self.forget()

    def forget(self) -> None:
        """Starts anew where autograd keeps nothing: whatever there is was made before, and nobody asks how."""
        self._cells.clear()
        self.due.clear()
        self.victims.forget_classes()
        self.first_us = self.again_us = 0.0

    def ran_again(self, took_us: float) -> None:
        """Notes the time of an operator that ran again."""
        self.clock_us += took_us
        self.again_us += took_us
        if self.again_us > self.warn_factor * self.first_us:
            self.on_thrash()

    def stop(self) -> None:
        """Holds no budget any more; what is dropped can still be made again."""
        self._limit = 1 << 62

    # -- room -----------------------------------------------------------------------------------------------------

    def make_room(self, need_bytes: int, what: str, *, is_sure: bool = True) -> None:
        """Drops until as many bytes fit.

        Args:
            need_bytes: Bytes that will be taken.
            what: Who takes them, for the sentence where they cannot be had.
            is_sure: Whether that is known; what was only estimated is tried even where it does not fit.

        Raises:
            PolicyError: Nothing is left to drop.
        """
        lack = self.counter.lacks_bytes(need_bytes, self._limit)
        if lack <= 0:
            return
        is_collected = False
        while lack > 0:
            victim = self.victims.choose(self.clock_us)
            if victim is not None:
                self.drop(victim)
            elif not self._let_go_of_anchor():
                if is_collected or not is_sure:
                    break
                gc.collect()  # cycles of the job's own may hold what it lets go of
                is_collected = True
            lack = self.counter.lacks_bytes(need_bytes, self._limit)
        if lack > 0 and is_sure:
            used = self.counter.used_bytes()
            raise PolicyError(
                f"remat cannot hold {format_bytes(self.budget_bytes)}: {what} needs {format_bytes(need_bytes)} at once "
                f"beside {format_bytes(used)} that cannot be dropped (parameters, gradients, optimizer state, inputs, "
                f"and what is in use), {lack:,} bytes too many. "
                f"Give it {format_bytes(used + need_bytes + MARGIN_BYTES)} "
                "or more, a smaller batch, or a policy that makes the rest smaller."
            )

    def drop(self, cell: Cell) -> None:
        """Drops a cell's content, or carries it out of the device where that is quicker than making it again."""
        storage = cell.hold
        assert storage is not None
        if self.swapping is not None and cell.place is None:
            cell.place = self.swapping.carry_out(storage, self.victims.remake_us(cell))
        if cell.place is None:
            self.victims.dropped(cell)
        self.victims.remove(cell)
        self.dropped += 1
        cell.hold = None

    def drop_due(self) -> None:
        """Drops what a plan wants dropped and nobody holds any more."""
        waiting = []
        for cell in self.due:
            if may_go(cell):
                self.drop(cell)
            elif cell.saved and cell.hold is not None:
                waiting.append(cell)
        self.due = waiting

    def adopt(self, cell: Cell, storage: torch.UntypedStorage) -> None:
        """Takes a storage with the content of a cell that was gone."""
        cell.hold = storage
        cell.used_us = self.clock_us
        self.place(cell, storage)
        self.victims.made_again(cell)
        if cell.saved:
            self.victims.add(cell)

    def fetch(self, cell: Cell) -> torch.UntypedStorage:
        """Carries a cell's content back."""
        assert self.swapping is not None
        self.make_room(cell.size_bytes, "what is carried back")
        storage = self.swapping.carry_back(cell.place)
        self.adopt(cell, storage)
        return storage

    def _forget_place(self, cell: Cell) -> None:
        if cell.place is not None:
            assert self.swapping is not None
            self.swapping.forget(cell.place)
            cell.place = None

    def _let_go_of_anchor(self) -> bool:
        """Lets go of an input that only recipes hold, where all that is made from it is there; what is then stays."""
        for cell in list(self._cells.values()):
            storage = cell.storage()
            if cell.recipe is not None or storage is None or cell.saved or not cell.size_bytes or not cell.readers:
                continue
            if torch._C._storage_Use_Count(storage._cdata) == 1 and self._settle(cell):
                return True
        return False

    def _settle(self, cell: Cell) -> bool:
        """Lets nothing depend on an input any more; False where something made from it is dropped."""
        dependants: list[Recipe] = []
        there: list[tuple[Cell, torch.UntypedStorage]] = []
        pending, seen = [cell], set()
        while pending:
            for recipe in pending.pop().live_readers():
                if id(recipe) in seen:
                    continue
                seen.add(id(recipe))
                dependants.append(recipe)
                for output in recipe.outputs:
                    made = output()
                    if made is None:
                        continue
                    storage = made.storage()
                    if storage is not None:
                        there.append((made, storage))
                    elif made.saved:
                        return False
                    else:
                        pending.append(made)
        for recipe in dependants:
            recipe.can_repeat = False
            recipe.anchors = ()
        for made, storage in there:  # from now on these are what nobody can make again
            made.recipe = None
            self.victims.remove(made)
            for recipe in made.live_readers():
                recipe.anchors += (storage,)
        return True
