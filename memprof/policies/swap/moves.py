"""Moves storages out as forward packs them and back before backward needs them, a bounded number at a time."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.utils.checkpoint

_CHECKPOINT = torch.utils.checkpoint.__file__


class Carrier(Protocol):
    """Destination of moved storages; starts copies and waits for them later.

    Attributes:
        device: The device it moves from, such as ``cpu`` or ``cuda:0``.
    """

    device: str

    def send(self, storage: torch.UntypedStorage) -> Any:
        """Starts the copy out and returns the place; the storage must not change until `sent`."""
        ...

    def sent(self, place: Any) -> bool:
        """Waits for the copy out; returns False if it failed and the storage must stay."""
        ...

    def fetch(self, place: Any) -> torch.UntypedStorage:
        """Allocates memory and starts the copy back into it."""
        ...

    def fetched(self, place: Any) -> None:
        """Waits for the copy back."""
        ...

    def forget(self, place: Any, storage: torch.UntypedStorage | None) -> None:
        """Frees the place once no copy between it and the storage is pending."""
        ...


class Group:
    """Storages packed by one autograd node, which leave and return together.

    The order in which a node packs its tensors is undefined, so nothing may depend on it.
    """

    def __init__(self, number: int, node: int) -> None:
        self.number = number
        self.node = node
        self.was_needed = False
        self._members: list[weakref.ref[Moved]] = []

    def add(self, moved: Moved) -> None:
        """Adds a storage, which holds a reference to the group."""
        self._members.append(weakref.ref(moved))

    def __iter__(self) -> Iterator[Moved]:
        return (moved for member in self._members if (moved := member()) is not None)


class Moved:
    """A storage that was or is being moved.

    Attributes:
        group: The storages packed by the same node.
        original: Weak reference to the storage.
        held: The storage, until the copy out is complete.
        place: Location of its bytes.
        coming: The storage it is copied back into.
    """

    def __init__(self, moves: Moves, group: Group, storage: torch.UntypedStorage) -> None:
        self._moves = moves
        self.group = group
        self.original = weakref.ref(storage)
        self.held: torch.UntypedStorage | None = storage
        self.coming: torch.UntypedStorage | None = None
        self.place = moves.carrier.send(storage)
        group.add(self)

    def take_again(self, storage: torch.UntypedStorage) -> None:
        """Copies it out again."""
        self._moves.send_again(self, storage)

    def restored(self) -> torch.UntypedStorage:
        """Returns the storage, copied back if it is gone."""
        return self._moves.restored(self)

    def __del__(self) -> None:
        if hasattr(self, "place"):
            self._moves.carrier.forget(self.place, self.held if self.coming is None else self.coming)


class Moves:
    """Order of moves: packed first, out first, back last.

    Every event is defined by the program, not by the speed of the disk. Storages packed by one node are released, and
    must be out, when the ``distance``-th node after it packs or the outermost forward ends. Memory is allocated again
    when they are needed, or when those of one of the ``distance`` nodes after it are. Memory use therefore does not
    depend on copy speed.
    """

    def __init__(self, carrier: Carrier, minimum_bytes: int, distance: int) -> None:
        self.carrier = carrier
        self._minimum_bytes = minimum_bytes
        self._distance = distance
        self._count = 0
        self._leaving: deque[list[Moved]] = deque()
        self._groups: weakref.WeakValueDictionary[int, Group] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()  # on CUDA backward runs in its own thread

    def takes(self, tensor: torch.Tensor) -> bool:
        """Returns whether a tensor's storage is on the carrier's device, and large enough."""
        return str(tensor.device) == self.carrier.device and tensor.untyped_storage().nbytes() >= max(
            self._minimum_bytes, 1
        )

    def take(self, tensor: torch.Tensor) -> Moved:
        """Starts moving a tensor's storage out."""
        with self._lock:
            # Autograd numbers its nodes as it creates them, and then has them pack. torch's checkpoint packs a region's
            # inputs without a node, or with one of its own, depending on the version: treat them as a separate group.
            node = torch._C._autograd._get_sequence_nr()
            if sys._getframe(2).f_code.co_filename == _CHECKPOINT:
                node = -node
            if not self._leaving or self._leaving[-1][0].group.node != node:
                self._leave_room(self._distance - 1)
                group = Group(self._count, node)
                self._count += 1
                self._groups[group.number] = group
                self._leaving.append([])
            else:
                group = self._leaving[-1][0].group
            moved = Moved(self, group, tensor.untyped_storage())
            self._leaving[-1].append(moved)
            if not self._distance:
                self._leave_room(0)
            return moved

    def flush(self) -> None:
        """Releases all storages whose copy out is pending."""
        with self._lock:
            self._leave_room(0)

    def send_again(self, moved: Moved, storage: torch.UntypedStorage) -> None:
        """Copies a storage out again that is out or on its way."""
        with self._lock:
            self.carrier.sent(moved.place)
            self.carrier.forget(moved.place, storage)
            moved.place = self.carrier.send(storage)
            if moved.held is None and not self.carrier.sent(moved.place):
                moved.held = storage

    def restored(self, moved: Moved) -> torch.UntypedStorage:
        """Returns a storage, and starts copying back those that backward needs next."""
        with self._lock:
            storage = self._start(moved)
            group = moved.group
            if self._distance and not group.was_needed:
                group.was_needed = True
                for number in range(group.number, group.number - 1 - self._distance, -1):
                    for ahead in self._groups.get(number) or ():
                        self._start(ahead)
            if moved.coming is not None:
                self.carrier.fetched(moved.place)  # every time: the next reader may compute on another stream
            return storage

    def _start(self, moved: Moved) -> torch.UntypedStorage:
        for storage in (moved.coming, moved.held, moved.original()):
            if storage is not None:
                return storage
        moved.coming = self.carrier.fetch(moved.place)
        return moved.coming

    def _leave_room(self, room: int) -> None:
        while len(self._leaving) > max(room, 0):
            for moved in self._leaving.popleft():
                if self.carrier.sent(moved.place):
                    moved.held = None
