"""Moves contents out of a device if copying them back is faster than recomputing them."""

from __future__ import annotations

from typing import Any

import torch

from memprof.policies.swap.moves import Carrier


class Swapping:
    """A carrier and its speed."""

    def __init__(self, carrier: Carrier, bytes_per_us: float) -> None:
        """Stores the carrier.

        Args:
            carrier: Destination of the contents.
            bytes_per_us: Its speed.
        """
        self._carrier = carrier
        self._bytes_per_us = bytes_per_us

    def carry_out(self, storage: torch.UntypedStorage, recompute_us: float) -> Any:
        """Copies a storage's bytes out and returns the place; None if recomputing is faster or the copy failed.

        Args:
            storage: The storage.
            recompute_us: Time to recompute its content.
        """
        if 2 * storage.nbytes() / self._bytes_per_us >= recompute_us:
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
        """Frees the place."""
        self._carrier.forget(place, None)
