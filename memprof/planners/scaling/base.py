"""The common interface of scaled steps, however their growth was modelled."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from memprof.errors import UsageError
from memprof.replay.rounding import rounded
from memprof.trace.schema import Ints, Storages
from memprof.trace.step import Step


class SizedStep(Protocol):
    """A step at any size.

    Attributes:
        sizes: The recorded sizes.
        source: Source of other sizes (policies.base.SOURCES): modelled from several recordings, or a rule from one.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """The recorded sizes."""
        ...

    @property
    def source(self) -> str:
        """Source of other sizes: ``modelled`` or ``rule``."""
        ...

    def step_at(self, size: int) -> Step:
        """Returns the step as it would be recorded at a size."""
        ...


def check_size(size: int) -> None:
    """Rejects an invalid size.

    Raises:
        UsageError: It is not positive.
    """
    if size < 1:
        raise UsageError(f"invalid size {size}: must be at least 1.")


def resized(base: Storages, requested: Ints, shape: object) -> Storages:
    """Sets the sizes of storages, rounded as by their allocators.

    Args:
        base: The storages as recorded.
        requested: Requested bytes of each; where they are as recorded, so are the allocated bytes.
        shape: The matching shapes.
    """
    allocated = rounded(requested, base.device)
    # Memory not owned by the allocator is unchanged.
    keeps = (requested == base.requested_bytes) | (base.allocated_bytes == 0)
    return base.replace(
        requested_bytes=requested, allocated_bytes=np.where(keeps, base.allocated_bytes, allocated), shape=shape
    )
