"""The settings: two files are a whole policy, and a third proposes it to searches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from memprof.policies.base import Policy


@dataclass(frozen=True)
class DryOnly(Policy):
    """Runs the model under autocast.

    Attributes:
        dtype: The short type.
    """

    name: ClassVar[str] = "dry_only"
    tried_by_default: ClassVar[bool] = True
    has_candidates: ClassVar[bool] = True
    changes_kernels: ClassVar[bool] = True
    numerics: ClassVar[str] = "rounding"
    flag_help: ClassVar[str] = "run the model in this type"
    flag_example: ClassVar[str] = "bf16"

    dtype: str = "bf16"

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Reads a type."""
        return cls(text)

    def describe(self) -> str:
        """Returns a short description."""
        return f"dry_only {self.dtype}"
