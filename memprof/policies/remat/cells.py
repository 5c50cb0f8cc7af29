"""Tracks a job's storages: contents, the recipes that compute them, and their readers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_LISTS = (list, tuple)


class Cell:
    """One version of a storage's content. An in-place operator creates a new cell.

    Attributes:
        recipe: How it was computed; None if unknown or not repeatable.
        number: Index among the recipe's outputs.
        number_in_step: Index among the contents of the observed step; -1 if none was observed when it was made.
        size_bytes: Size of the storage.
        device: Device of the storage.
        original: Weak reference to the storage.
        hold: Strong reference to it, while autograd saves it or another recomputation needs it.
        saved: How many times autograd saved it.
        turn: Index among the contents that autograd saved in the step; -1 if it never saved this one.
        handles: Autograd's handles that hold a view of the storage; dropping the content releases their views.
        is_kept: Whether it is never dropped, whatever the budget.
        locks: Number of operators about to run that need it.
        used_us: Time of the last use, on the clock of summed operator time.
        views: How many of the handles exist; each holds the storage.
        readers: Recipes that read it.
        after: The storage's next cell, if autograd had saved this one: autograd then reads the later content.
        place: Location of its bytes in host memory or on disk.
    """

    __slots__ = (
        "__weakref__",
        "after",
        "device",
        "handles",
        "hold",
        "is_kept",
        "locks",
        "number",
        "number_in_step",
        "original",
        "place",
        "readers",
        "recipe",
        "saved",
        "size_bytes",
        "turn",
        "used_us",
        "views",
    )

    def __init__(self, recipe: Recipe | None, number: int, size_bytes: int, device: torch.device) -> None:
        self.recipe = recipe
        self.number = number
        self.size_bytes = size_bytes
        self.device = device
        self.original: Original | None = None
        self.hold: torch.UntypedStorage | None = None
        self.saved = 0
        self.turn = self.number_in_step = -1
        self.handles: list[weakref.ref[Any]] = []
        self.views = 0
        self.is_kept = False
        self.locks = 0
        self.used_us = 0.0
        self.readers: list[weakref.ref[Recipe]] | None = None
        self.after: Cell | None = None
        self.place: Any = None

    def storage(self) -> torch.UntypedStorage | None:
        """Returns the storage that has the content, None if it is gone."""
        if self.hold is not None:
            return self.hold
        return self.original() if self.original is not None else None

    def is_there(self) -> bool:
        """Whether the content is in memory."""
        return self.hold is not None or (self.original is not None and self.original() is not None)

    def is_lent(self) -> bool:
        """Whether backward is using it right now, through one of the handles."""
        return any(handle.is_lent() for each in self.handles if (handle := each()) is not None)

    def let_go(self) -> None:
        """Releases the storage, and the handles' views of it."""
        if self.views:
            with torch._C._DisableTorchDispatch():
                for each in self.handles:
                    if (handle := each()) is not None:
                        handle.let_go()
        self.handles, self.views, self.hold = [], 0, None

    def live_readers(self) -> list[Recipe]:
        """Returns the recipes that read it and whose outputs are still needed."""
        return [recipe for reader in self.readers or () if (recipe := reader()) is not None]

    def add_reader(self, reader: weakref.ref[Recipe]) -> None:
        """Adds a recipe that reads it."""
        if self.readers is None:
            self.readers = [reader]
            return
        self.readers.append(reader)
        if not len(self.readers) & 63:
            self.readers = [each for each in self.readers if each() is not None]

    def latest(self) -> Cell:
        """Returns the cell that autograd will read: the latest content of the storage."""
        cell = self
        while cell.after is not None:
            cell = cell.after
        return cell


class Original(weakref.ref[torch.UntypedStorage]):
    """Weak reference to a storage.

    Attributes:
        address: Its key.
    """

    __slots__ = ("address",)
    address: int


class Need:
    """Memory need of a kind of run: an operator on tensors of given shapes.

    Attributes:
        highest_bytes: Peak bytes during the run, -1 before the first.
        runs: Number of runs so far.
        is_measured: Whether the peak was measured from the allocator's events; otherwise it is an estimate.
        is_awaited: Whether a recorder measured it and will report when its session ends.
        least_us: Shortest duration seen: excludes interference from the machine and the recorder.
    """

    __slots__ = ("highest_bytes", "is_awaited", "is_measured", "least_us", "runs")

    def __init__(self) -> None:
        self.highest_bytes = -1
        self.runs = 0
        self.is_measured = False
        self.is_awaited = False
        self.least_us = float("inf")


class Ref:
    """Layout of a tensor among the arguments of a recipe: a view of the content that the recipe names at its turn."""

    __slots__ = ("dtype", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype = tensor.dtype
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def is_layout_of(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor is plain memory of this layout, at any place of its storage."""
        return (
            tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.dtype is self.dtype
            and tensor.shape == self.size
            and tensor.stride() == self.stride
        )

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Returns the tensor as a view of a storage."""
        return view_of(storage, self.dtype, self.offset, self.size, self.stride)


class Blank:
    """Placeholder for running statistics in a recipe's arguments: a second write would update them twice."""

    __slots__ = ("device", "dtype", "size")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Records the shape; the output of a normalisation in training does not depend on the values."""
        self.size, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def fresh(self) -> torch.Tensor:
        """Returns scratch memory for the write."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)


class Recipe:
    """One repeatable run of an operator.

    Attributes:
        function: The operator.
        args: Its arguments, with tensors replaced by Ref and Blank.
        kwargs: Its keyword arguments, likewise.
        inputs: The cells it reads, one for each Ref, from left to right.
        anchors: Storages of inputs that cannot be recomputed, held for the second run.
        outputs: The cells it created, as long as they are needed.
        changes: The input whose storage the output takes over; None if the operator allocates its own.
        random: State of each random generator before the run, if it drew numbers.
        need: Memory it needs while it runs.
        sequence: Autograd's counter during the run, which recordings use to place it.
        can_repeat: Whether its inputs are still available.
        key: Plan key of its output; "" if no plan names it.
    """

    __slots__ = (
        "__weakref__",
        "anchors",
        "args",
        "can_repeat",
        "changes",
        "function",
        "inputs",
        "key",
        "kwargs",
        "need",
        "outputs",
        "random",
        "sequence",
    )

    def __init__(self, function: Callable[..., Any], need: Need, sequence: int) -> None:
        self.function = function
        self.need = need
        self.sequence = sequence
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] | None = None
        self.inputs: tuple[Cell, ...] = ()
        self.anchors: tuple[torch.UntypedStorage, ...] = ()
        self.outputs: list[weakref.ref[Cell]] = []
        self.changes: Cell | None = None
        self.random: Any = None
        self.can_repeat = True
        self.key = ""


def view_of(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: Any, size: Any, stride: tuple[int, ...]
) -> torch.Tensor:
    """Returns a tensor on a storage, invisible to all dispatch modes."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Returns a copy of a storage, invisible to all dispatch modes."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()


def arguments_of(recipe: Recipe, storages: Mapping[Cell, torch.UntypedStorage]) -> tuple[Any, dict[str, Any]]:
    """Returns a recipe's arguments as tensors."""
    cells = iter(recipe.inputs)
    args = [_real(value, cells, storages) for value in recipe.args]
    return args, {name: _real(value, cells, storages) for name, value in (recipe.kwargs or {}).items()}


def _real(value: Any, cells: Iterator[Cell], storages: Mapping[Cell, torch.UntypedStorage]) -> Any:
    # A module-level function, because a recursive closure is a reference cycle and would hold the storages.
    if type(value) is Ref:
        return value.view(storages[next(cells)])
    if type(value) is Blank:
        with torch._C._DisableTorchDispatch():
            return value.fresh()
    if type(value) in _LISTS:
        return [_real(item, cells, storages) for item in value]
    return value
