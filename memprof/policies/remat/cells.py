"""What is known of a job's storages: contents, the recipes by which they were made, and who reads them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

_LISTS = (list, tuple)


class Cell:
    """One content of a storage. An operator that changes a storage in place makes another cell of it.

    Attributes:
        recipe: How it was made; None where that is not known, or nobody could do it again.
        number: Which of the recipe's outputs it is.
        size_bytes: Size of the storage.
        device: Where the storage is.
        original: That storage, as long as somebody holds it.
        hold: The same, held because autograd saved it, or because it is being made again for another one.
        saved: How many times autograd saved it.
        is_kept: Whether it stays whatever the budget.
        locks: How many operators about to run need it.
        used_us: When it was used last, on the clock of summed operator time.
        readers: Recipes that read it.
        after: The cell that the storage had next, where autograd had saved this one: it gets the later content.
        class_number: The class of dropped cells that it belongs to; -1 where it was not dropped.
        slot: Its place among the cells that may be dropped; -1 where it is not among them.
        place: Where its bytes are in host memory or on disk.
        is_again: Whether it was dropped and is there again.
    """

    __slots__ = (
        "__weakref__",
        "after",
        "class_number",
        "device",
        "hold",
        "is_again",
        "is_kept",
        "locks",
        "number",
        "original",
        "place",
        "readers",
        "recipe",
        "saved",
        "size_bytes",
        "slot",
        "used_us",
    )

    def __init__(self, recipe: Recipe | None, number: int, size_bytes: int, device: torch.device) -> None:
        """Knows no storage yet."""
        self.recipe = recipe
        self.number = number
        self.size_bytes = size_bytes
        self.device = device
        self.original: Original | None = None
        self.hold: torch.UntypedStorage | None = None
        self.saved = 0
        self.is_kept = False
        self.locks = 0
        self.used_us = 0.0
        self.readers: list[weakref.ref[Recipe]] | None = None
        self.after: Cell | None = None
        self.class_number = -1
        self.slot = -1
        self.place: Any = None
        self.is_again = False

    def storage(self) -> torch.UntypedStorage | None:
        """Returns the storage that has the content, None where it is gone."""
        if self.hold is not None:
            return self.hold
        return self.original() if self.original is not None else None

    def is_there(self) -> bool:
        """Whether the content is in memory."""
        return self.hold is not None or (self.original is not None and self.original() is not None)

    def live_readers(self) -> list[Recipe]:
        """Returns the recipes that read it, as far as anybody still wants what they make."""
        return [recipe for reader in self.readers or () if (recipe := reader()) is not None]

    def add_reader(self, reader: weakref.ref[Recipe]) -> None:
        """Notes a recipe that reads it."""
        if self.readers is None:
            self.readers = [reader]
            return
        self.readers.append(reader)
        if not len(self.readers) & 63:
            self.readers = [each for each in self.readers if each() is not None]

    def latest(self) -> Cell:
        """Returns the cell that holds what autograd will read: the last content of the storage."""
        cell = self
        while cell.after is not None:
            cell = cell.after
        return cell


class Original(weakref.ref[torch.UntypedStorage]):
    """A storage, as long as somebody holds it.

    Attributes:
        address: Its key.
    """

    __slots__ = ("address",)
    address: int


class Need:
    """What a kind of run takes: an operator on tensors of some shapes.

    Attributes:
        highest_bytes: Bytes it takes while it runs, -1 before the first time.
        runs: How often it ran.
        is_heard: Whether that was heard from the allocator; else it is a guess.
        is_awaited: Whether a recorder has heard it, and will tell when its session ends.
        least_us: The shortest time that it took: what else the machine and the recorder do is no cost of its own.
    """

    __slots__ = ("highest_bytes", "is_awaited", "is_heard", "least_us", "runs")

    def __init__(self) -> None:
        """Knows nothing."""
        self.highest_bytes = -1
        self.runs = 0
        self.is_heard = False
        self.is_awaited = False
        self.least_us = float("inf")


class Ref:
    """A tensor among the arguments of a recipe: a view of a cell."""

    __slots__ = ("cell", "dtype", "offset", "size", "stride")

    def __init__(self, cell: Cell, tensor: torch.Tensor) -> None:
        """Notes how a tensor lies in its storage."""
        self.cell = cell
        self.dtype = tensor.dtype
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()

    def view(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Returns the tensor on a storage."""
        return view_of(storage, self.dtype, self.offset, self.size, self.stride)


class Blank:
    """Running statistics among the arguments of a recipe: written a second time, they would move twice."""

    __slots__ = ("device", "dtype", "size")

    def __init__(self, tensor: torch.Tensor) -> None:
        """Notes the shape; what a normalisation in training returns does not depend on the values."""
        self.size, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def fresh(self) -> torch.Tensor:
        """Returns memory to write into."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)


class Recipe:
    """One run of an operator that can be repeated.

    Attributes:
        function: The operator.
        args: Its arguments, with Ref and Blank in the place of tensors.
        kwargs: Its keyword arguments in the same way.
        inputs: The cells it reads, each once.
        anchors: Storages of inputs that nobody could make again, held for the second run.
        outputs: The cells it made, as long as they are wanted.
        changes: The input whose storage the output takes over; None where the operator makes its own.
        random: The state of each random generator before it ran, where it drew numbers.
        need: What it takes while it runs.
        cost_us: How long it takes, as far as is known when it ran.
        sequence: Autograd's counter while it ran, by which recordings know its place.
        can_repeat: Whether its inputs can still be had.
        key: What a plan calls what it makes; "" where no plan does.
    """

    __slots__ = (
        "__weakref__",
        "anchors",
        "args",
        "can_repeat",
        "changes",
        "cost_us",
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
        """Has no arguments yet."""
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
        self.cost_us = 0.0
        self.can_repeat = True
        self.key = ""


def view_of(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: Any, size: Any, stride: tuple[int, ...]
) -> torch.Tensor:
    """Returns a tensor on a storage that no mode of anybody sees being made."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


def copied(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Returns a copy of a storage that no mode of anybody sees being made."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()


def arguments_of(recipe: Recipe, storages: Mapping[Cell, torch.UntypedStorage]) -> tuple[Any, dict[str, Any]]:
    """Returns a recipe's arguments as tensors.

    Args:
        recipe: The recipe.
        storages: Where the content of each input is.
    """
    args = [_real(value, storages) for value in recipe.args]
    return args, {name: _real(value, storages) for name, value in (recipe.kwargs or {}).items()}


def _real(value: Any, storages: Mapping[Cell, torch.UntypedStorage]) -> Any:
    # Not a function inside the other: one that calls itself is a cycle, which would hold the storages.
    if type(value) is Ref:
        return value.view(storages[value.cell])
    if type(value) is Blank:
        with torch._C._DisableTorchDispatch():
            return value.fresh()
    if type(value) in _LISTS:
        return [_real(item, storages) for item in value]
    return value
