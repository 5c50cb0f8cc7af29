"""What steps of any size have in common, however their growth was learned."""

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
        sizes: The sizes it was recorded at.
        source: How it is known at others (policies.base.SOURCES): modelled from several, or a rule from one.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes it was recorded at."""
        ...

    @property
    def source(self) -> str:
        """How it is known at other sizes: ``modelled`` or ``rule``."""
        ...

    def step_at(self, size: int) -> Step:
        """Returns the step as it would be recorded at a size."""
        ...


def check_size(size: int) -> None:
    """Refuses a size that is none.

    Raises:
        UsageError: It is not positive.
    """
    if size < 1:
        raise UsageError(f"A step of size {size} does not exist: sizes begin at 1.")


def resized(base: Storages, requested: Ints, shape: object) -> Storages:
    """Gives storages other sizes, and rounds as their allocators do.

    Args:
        base: The storages as recorded.
        requested: Bytes each is to have; where they are as recorded, so is what was allocated.
        shape: The shapes that go with them.
    """
    allocated = rounded(requested, base.device)
    # Memory that the allocator does not own stays so.
    keeps = (requested == base.requested_bytes) | (base.allocated_bytes == 0)
    return base.replace(
        requested_bytes=requested, allocated_bytes=np.where(keeps, base.allocated_bytes, allocated), shape=shape
    )
