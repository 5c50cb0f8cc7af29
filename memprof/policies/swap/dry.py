"""Simulates the copies of a dry run, whose storages have no content."""

from __future__ import annotations

import torch


class DryCarrier:
    """Allocates memory where the other carriers do, for tensors that have none; every copy completes at once.

    Attributes:
        device: The device it moves from, such as ``cpu`` or ``cuda:0``.
    """

    def __init__(self, device: torch.device) -> None:
        """Stores the device."""
        self.device = str(device)

    def send(self, storage: torch.UntypedStorage) -> int:
        """Returns the bytes moved out."""
        return storage.nbytes()

    def sent(self, place: int) -> bool:
        """Always true: copies never fail here."""
        return True

    def fetch(self, place: int) -> torch.UntypedStorage:
        """Allocates a storage of the same size."""
        return torch.empty(place, dtype=torch.uint8, device=self.device).untyped_storage()

    def fetched(self, place: int) -> None:
        """Does nothing: there is nothing to wait for."""

    def forget(self, place: int, storage: torch.UntypedStorage | None) -> None:
        """Does nothing: nothing is stored."""

    def close(self) -> None:
        """Does nothing: no copy is in progress."""
