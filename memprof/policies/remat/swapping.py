"""Carries contents out of a device where copying them back takes less time than making them again."""

from __future__ import annotations

from typing import Any

import torch

from memprof.policies.swap.moves import Carrier


class Swapping:
    """A carrier, and how fast it is."""

    def __init__(self, carrier: Carrier, bytes_per_us: float) -> None:
        """Takes the carrier.

        Args:
            carrier: Where contents go.
            bytes_per_us: How fast.
        """
        self._carrier = carrier
        self._bytes_per_us = bytes_per_us

    def carry_out(self, storage: torch.UntypedStorage, remake_us: float) -> Any:
        """Carries a storage's bytes out and returns the place; None where making them again is quicker, or it failed.

        Args:
            storage: The storage.
            remake_us: What making its content again takes.
        """
        if 2 * storage.nbytes() / self._bytes_per_us >= remake_us:
            return None
        place = self._carrier.send(storage)
        if self._carrier.sent(place):
            return place
        self._carrier.forget(place, storage)
        return None

    def carry_back(self, place: Any) -> torch.UntypedStorage:
        """Returns a storage with the bytes."""
        storage = self._carrier.fetch(place)
        self._carrier.fetched(place)
        return storage

    def forget(self, place: Any) -> None:
        """Gives the place back."""
        self._carrier.forget(place, None)
