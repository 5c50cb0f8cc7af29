"""Carries storages of a dry run nowhere: there is nothing in them to copy."""

from __future__ import annotations

import torch


class DryCarrier:
    """Takes memory again where the other carriers do, of tensors that have none; every copy is over at once.

    Attributes:
        device: The device it moves from, such as ``cpu`` or ``cuda:0``.
    """

    def __init__(self, device: torch.device) -> None:
        """Knows the device of what it moves."""
        self.device = str(device)

    def send(self, storage: torch.UntypedStorage) -> int:
        """Returns the bytes that are out from now on."""
        return storage.nbytes()

    def sent(self, place: int) -> bool:
        """Copies never fail here."""
        return True

    def fetch(self, place: int) -> torch.UntypedStorage:
        """Takes memory for as many bytes."""
        return torch.empty(place, dtype=torch.uint8, device=self.device).untyped_storage()

    def fetched(self, place: int) -> None:
        """There is nothing to wait for."""

    def forget(self, place: int, storage: torch.UntypedStorage | None) -> None:
        """Nothing is kept anywhere."""

    def close(self) -> None:
        """Nothing is under way."""
