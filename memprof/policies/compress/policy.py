"""Keeps saved activations of chosen modules in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from memprof.errors import PolicyError
from memprof.policies.base import Policy
from memprof.policies.plan.patterns import condensed
from memprof.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from memprof.trace.step import Step

#: Elements that share a scale.
BLOCK = 256
#: Elements turned at a time, so that the temporaries stay small: 1 MiB of float32, 16 MiB on a device, where a kernel
#: on less takes no longer to run than to launch.
CHUNK, DEVICE_CHUNK = 1 << 18, 1 << 22


@dataclass(frozen=True)
class Compress(Policy):
    """Keeps saved activations of chosen modules in 8 bits: gradients become approximate.

    Attributes:
        modules: Patterns of module names, "." for the whole model; floating point tensors saved while these run
            forward are packed.
        minimum_bytes: Smaller storages stay as they are.
    """

    name: ClassVar[str] = "compress"
    changes_kernels: ClassVar[bool] = True
    takes_inputs: ClassVar[bool] = True
    flag_help: ClassVar[str] = (
        "store activations of these modules in 8 bits with a scale for every 256 values (approximate)"
    )
    flag_example: ClassVar[str] = "'layers.*'"
    numerics: ClassVar[str] = "approximate"
    source: ClassVar[str] = "rule"
    errors_seen: ClassVar[tuple[float, float]] = (0.01, 0.10)
    time_errors_seen: ClassVar[tuple[float, float] | None] = (0.3, 0.95)
    handles_saved: ClassVar[bool] = True
    why_not_torch: ClassVar[str] = "torch cannot pack saved tensors in 8 bits"

    modules: tuple[str, ...] = (".",)
    minimum_bytes: int = 1 << 12

    def __post_init__(self) -> None:
        """Checks the settings."""
        if not self.modules or not all(self.modules):
            raise PolicyError("compress needs patterns of module names: write modules = ['layers.*'].")
        if self.minimum_bytes < 0:
            raise PolicyError(f"compress: invalid minimum_bytes {self.minimum_bytes}; write minimum_bytes = 4096.")

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Reads ``layers.*,head``.

        Raises:
            PolicyError: There is no pattern.
        """
        parts = tuple(part.strip() for part in text.split(",") if part.strip())
        if not parts:
            raise PolicyError(f"compress needs patterns of module names; write --compress {cls.flag_example}.")
        return cls(modules=parts)

    @classmethod
    def module_choices(cls, step: Step, call: range) -> tuple[Callable[[tuple[str, ...]], Policy], ...]:
        """Compresses saved activations of modules."""
        return (cls,)

    def describe(self) -> str:
        """Returns the packed modules in words."""
        chosen = "everything saved" if self.modules == (".",) else f"what {condensed(self.modules)} save"
        small = (
            "" if self.minimum_bytes == type(self).minimum_bytes else f", from {format_bytes(self.minimum_bytes)} on"
        )
        return f"compress {chosen} to 8 bits{small}"
