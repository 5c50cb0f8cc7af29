"""A policy of one setting, added by its folder and one line of the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from memprof.errors import PolicyError
from memprof.policies.base import Policy

if TYPE_CHECKING:
    from memprof.trace.step import Step


@dataclass(frozen=True)
class Plugged(Policy):
    """Runs the forward of chosen modules again in backward.

    Attributes:
        modules: Patterns of their names.
    """

    name: ClassVar[str] = "plugged"
    tried_by_default: ClassVar[bool] = True
    has_candidates: ClassVar[bool] = True
    flag_help: ClassVar[str] = "run these modules again"
    flag_example: ClassVar[str] = "'layers.*'"

    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Validates the settings."""
        if not self.modules:
            raise PolicyError("plugged needs modules.")

    @property
    def handles_saved(self) -> bool:
        """Always true."""
        return True

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Reads patterns separated by commas."""
        return cls(tuple(text.split(",")))

    @classmethod
    def module_choices(cls, step: Step, call: range) -> tuple[Callable[[tuple[str, ...]], Policy], ...]:
        """Chooses modules as checkpoint does."""
        return (cls,)

    def describe(self) -> str:
        """Returns a short description."""
        return f"plugged {','.join(self.modules)}"
