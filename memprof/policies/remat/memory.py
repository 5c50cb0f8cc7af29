"""Enforces the budget: tracks storage contents, makes room by eviction, and restores dropped contents."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from memprof.errors import PolicyError
from memprof.policies.remat.cells import Cell, Original, Recipe, copied
from memprof.policies.remat.counters import Counter, FirstSteps
from memprof.policies.remat.schedule import Schedule
from memprof.policies.remat.sequence import Sequence
from memprof.policies.remat.victims import Swapping, cell_victims, may_go, settle, settle_input
from memprof.units import format_bytes

#: Bytes left free in every budget for the runtime itself: generator states, numbers in tensors.
MARGIN_BYTES = 16 * 1024
_NO_LIMIT = 1 << 62


def _do_nothing() -> None:
    """Default callback: does nothing."""


class Memory:
    """The contents of a job's storages under a budget.

    Attributes:
        budget_bytes: Maximum bytes allocated at once; 0 if only a plan decides.
        limit_bytes: The same without the margin for the runtime itself.
        cells: The contents by their storages' keys.
        clock_us: Summed time of the operators run.
        first_us: The same for first runs, since nothing was saved last.
        again_us: The same for recomputation.
        victims: Eviction candidates.
        saved: Number of tensors that autograd keeps.
        dropped: Number of cells dropped so far.
        peak: Measures the first steps, whose peak the budget is a share of; None once it is set.
        sequence: Which operator runs.
        schedule: Evictions planned for steps that repeat.
        due: Cells to drop once nothing else references them.
        warn_factor: Ratio of ``again_us`` to ``first_us`` at which to warn.
        on_thrash: Called at that ratio.
        on_excess: Called with the reason where nothing is left to drop; None to end the job.
    """

    def __init__(self, counter: Counter, budget_bytes: int, heuristic: str, swapping: Swapping | None) -> None:
        self.counter = counter
        self.budget_bytes = budget_bytes
        self.swapping = swapping
        self.victims = cell_victims(heuristic)
        self.clock_us = self.first_us = self.again_us = 0.0
        self.saved = 0
        self.dropped = 0
        self.due: list[Cell] = []
        self.peak: FirstSteps | None = None
        self.sequence = Sequence()
        self.warn_factor = 2.0
        self.on_thrash: Callable[[], None] = _do_nothing
        self.on_excess: Callable[[str], None] | None = None
        self._is_over = False
        self.limit_bytes = _NO_LIMIT
        self.schedule = Schedule(self.sequence, heuristic, can_plan=swapping is None)
        if budget_bytes:
            self.limit(budget_bytes)
        self.cells: dict[int, Cell] = {}
        self._on_gone = self._gone  # bound once

    def limit(self, budget_bytes: int) -> None:
        """Sets the budget: maximum bytes allocated at once."""
        self.budget_bytes = budget_bytes
        self.limit_bytes = max(budget_bytes - MARGIN_BYTES, 1)
        self.schedule.limit(self.limit_bytes)

    # -- contents -------------------------------------------------------------------------------------------------

    def find(self, storage: torch.UntypedStorage) -> Cell | None:
        """Returns the cell of a storage's current content, None if unknown."""
        return self.cells.get(storage._cdata)

    def meet(self, storage: torch.UntypedStorage) -> Cell:
        """Returns the cell of a storage; a storage of unknown origin gets a cell that cannot be recomputed."""
        cell = self.cells.get(storage._cdata)
        if cell is None:
            cell = Cell(None, 0, storage.nbytes(), storage.device)
            self.place(cell, storage)
        return cell

    def place(self, cell: Cell, storage: torch.UntypedStorage) -> None:
        """Records that a storage now has the content of a cell."""
        address = storage._cdata
        self.cells[address] = cell
        original = cell.original = Original(storage, self._on_gone)
        original.address = address
        if self.schedule.observation is not None:
            self.schedule.observation.came(cell)

    def _gone(self, original: Original) -> None:
        address = original.address
        cell = self.cells.get(address)
        if cell is not None and cell.original is original:
            del self.cells[address]
            cell.original = None
            if self.schedule.observation is not None:
                self.schedule.observation.left(cell)

    def before_write(self, storage: torch.UntypedStorage) -> None:
        """Prepares an in-place write to content that cannot be recomputed while others depend on it."""
        cell = self.cells.get(storage._cdata)
        if cell is None or cell.recipe is not None:
            return
        readers = [recipe for recipe in cell.live_readers() if recipe.can_repeat]
        if not readers:
            return
        if not settle(self.victims, cell):
            # A dropped content was computed from it: keep the old content for that.
            self.make_room(cell.size_bytes, "the copy for an in-place write")
            copy = copied(storage)
            for recipe in readers:
                recipe.anchors = tuple(copy if each is storage else each for each in recipe.anchors)
            del self.cells[storage._cdata]
            self.place(cell, copy)

    def changed(self, storage: torch.UntypedStorage, recipe: Recipe | None) -> Cell | None:
        """Records an in-place write: the storage has a new content.

        Args:
            storage: The storage.
            recipe: How the new content was computed; None if not repeatable.

        Returns:
            The cell of the new content; None if neither the old nor the new one is tracked.
        """
        before = self.cells.pop(storage._cdata, None)
        if before is None and recipe is None:
            return None  # nothing depends on it, and its cell, if it ever gets one, has no recipe either
        cell = Cell(recipe, 0, storage.nbytes(), storage.device)
        self.place(cell, storage)
        cell.used_us = self.clock_us
        if before is not None and recipe is not None and self.schedule.observation is not None:
            self.schedule.observation.made(cell, recipe, before)
        if before is not None:
            before.original = None
            if before.hold is not None:
                self.victims.remove(before)
                before.hold = None
            if before.saved:
                # Readers that check the version get PyTorch's own error; for others the later bytes are equivalent.
                before.after = cell
                cell.saved, before.saved = before.saved, 0
                cell.handles, cell.views, before.handles, before.views = before.handles, before.views, [], 0
                cell.hold = storage
                self.schedule.replace(before, cell)
                if recipe is not None:
                    self.victims.add(cell)
                else:
                    cell.is_kept = True
        return cell

    # -- autograd's saved tensors ---------------------------------------------------------------------------------

    def save(self, cell: Cell, storage: torch.UntypedStorage) -> None:
        """Records that autograd saves a cell."""
        is_first = not self.saved
        self.saved += 1  # before planning: if that is interrupted, the handle is deleted and counted down
        cell.saved += 1
        if is_first:
            self.schedule.begin()
            if self.peak is not None:
                self.peak.step_begins()
        if cell.saved == 1:
            self.schedule.saved(cell)
        cell.hold = storage
        cell.used_us = self.clock_us
        self.victims.add(cell)

    def release(self, cell: Cell) -> None:
        """Records that autograd releases a cell."""
        self.saved -= 1
        cell.saved -= 1
        if not cell.saved:
            self.victims.remove(cell)
            if not cell.locks:
                cell.hold = None
            cell.handles = []
            if cell.place is not None:
                assert self.swapping is not None
                self.swapping.forget(cell.place)
                cell.place = None
            if self.schedule.observation is not None and not cell.is_there():
                self.schedule.observation.left(cell)
        if not self.saved:
            self.forget()

    def forget(self) -> None:
        """Resets when autograd keeps nothing: the recipes of existing contents are no longer needed."""
        self.schedule.end(self.again_us)
        if self.peak is not None and (budget_bytes := self.peak.step_ended()):
            self.peak.stop()
            self.peak = None
            self.limit(budget_bytes)
        self.cells.clear()
        self.due.clear()
        self.victims.forget_classes()
        self.first_us = self.again_us = 0.0
        self._is_over = False

    def ran_again(self, took_us: float) -> None:
        """Adds the duration of a recomputed operator."""
        self.clock_us += took_us
        self.again_us += took_us
        if self.again_us > self.warn_factor * self.first_us:
            self.on_thrash()

    def stop(self) -> None:
        """Stops enforcing the budget; dropped contents can still be recomputed."""
        self.limit_bytes = _NO_LIMIT

    # -- room -----------------------------------------------------------------------------------------------------

    def make_room(self, need_bytes: int, what: str, *, is_exact: bool = True) -> None:
        """Drops contents until the given bytes fit.

        Args:
            need_bytes: Bytes about to be allocated.
            what: Who allocates them, for the error message.
            is_exact: Whether the number is exact; an estimate is tried even if it does not fit.

        Raises:
            PolicyError: Nothing is left to drop, and nothing is called instead.
        """
        lack = self.counter.lacks_bytes(need_bytes, self.limit_bytes)
        if lack <= 0:
            return
        is_collected = self._is_over
        while lack > 0:
            victim = self.next_victim()
            if victim is not None:
                self.drop(victim)
            elif not settle_input(self.victims, self.cells.values()):
                # An estimate may be too high, but what is allocated is certain.
                is_exact = is_exact or self.counter.used_bytes() > self.limit_bytes
                if is_collected or not is_exact:
                    break
                gc.collect()  # reference cycles of the job may hold dropped contents
                is_collected = True
            lack = self.counter.lacks_bytes(need_bytes, self.limit_bytes)
        if lack > 0 and is_exact:
            self._exceed(need_bytes, what, lack)

    def _exceed(self, need_bytes: int, what: str, lack_bytes: int) -> None:
        used = self.counter.used_bytes()
        short = (
            f"{format_bytes(self.budget_bytes)}: {what} needs {format_bytes(need_bytes)} at once in addition to "
            f"{format_bytes(used)} that cannot be dropped (parameters, gradients, optimizer state, inputs, and "
            f"storages in use), {lack_bytes:,} bytes too many. Set a budget of "
            f"{format_bytes(used + need_bytes + MARGIN_BYTES)} or more, use a smaller batch, or add a policy that "
            "reduces the rest."
        )
        if self.on_excess is None:
            raise PolicyError(f"remat cannot stay within {short}")
        self._is_over = True
        self.on_excess(f"remat goes over its budget of {short}")

    def next_victim(self) -> Cell | None:
        """Returns the content to drop next: the scheduled one, or else that of least h; None if none may go."""
        victim = self.schedule.next_victim()
        if victim is None:
            victim = self.victims.choose(self.clock_us)
            if victim is not None:
                self.schedule.chosen(victim)
        return victim

    def drop(self, cell: Cell) -> None:
        """Drops a cell's content, or moves it out of the device if that is faster than recomputing it."""
        storage = cell.hold
        assert storage is not None
        if self.swapping is not None and cell.place is None:
            cell.place = self.swapping.carry_out(storage, self.victims.cost_us(cell))
        if cell.place is None:
            self.victims.evicted(cell)
        self.victims.remove(cell)
        self.dropped += 1
        cell.let_go()

    def drop_due(self) -> None:
        """Drops what a plan marked and nothing references any more."""
        waiting = []
        for cell in self.due:
            if may_go(cell):
                self.drop(cell)
            elif cell.saved and cell.hold is not None:
                waiting.append(cell)
        self.due = waiting

    def adopt(self, cell: Cell, storage: torch.UntypedStorage) -> None:
        """Takes a storage with the restored content of a cell."""
        cell.hold = storage
        cell.used_us = self.clock_us
        self.place(cell, storage)
        self.victims.remade(cell)
        if cell.saved:
            self.victims.add(cell)

    def fetch(self, cell: Cell) -> torch.UntypedStorage:
        """Copies a cell's content back to the device."""
        assert self.swapping is not None
        self.make_room(cell.size_bytes, "the copy back")
        storage = self.swapping.carry_back(cell.place)
        self.adopt(cell, storage)
        return storage
