"""Drops tensors that chosen modules save for backward and recomputes them in backward."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Self

from memprof.errors import PolicyError
from memprof.policies.base import Policy
from memprof.policies.checkpoint.kinds import check_kinds, short_kind
from memprof.policies.plan.patterns import condensed

if TYPE_CHECKING:
    from collections.abc import Callable

    from memprof.trace.step import Step


@dataclass(frozen=True)
class Checkpoint(Policy):
    """Drops tensors that chosen modules save for backward, and recomputes their forward when backward needs them.

    Attributes:
        modules: Patterns of qualified names; each call of a matching module is one region. ``""`` is the root.
        segments: Number of regions into which one nn.Sequential is divided: that of ``modules``, or the longest of the
            model; 0 to make every chosen module a region.
        keep: Kinds of operators (``matmul``, ``conv``, ``attention``) or names (``aten.mm.default``) whose outputs
            are kept instead of recomputed; ``aten.mm.default#1+3`` for the first and third call in each region only.
    """

    name: ClassVar[str] = "checkpoint"
    tried_by_default: ClassVar[bool] = True
    tried_live: ClassVar[bool] = True
    flag_help: ClassVar[str] = (
        "Recompute the forward of modules in backward instead of saving activations. PATTERNS are qualified "
        "names; add keep=matmul,attention to keep outputs of some operators, or segments=4 to divide an nn.Sequential."
    )
    flag_example: ClassVar[str] = "'layers.*'"
    numerics: ClassVar[str] = "none"
    source: ClassVar[str] = "replayed"
    time_errors_seen: ClassVar[tuple[float, float] | None] = (0.12, 0.20)
    handles_saved: ClassVar[bool] = True
    why_not_torch: ClassVar[str] = ""

    modules: tuple[str, ...] = ()
    segments: int = 0
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks the settings."""
        for setting, value in (("modules", self.modules), ("keep", self.keep)):
            if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
                raise PolicyError(
                    f"checkpoint: {setting} must be a list of strings, such as ['layers.*'], not {value!r}."
                )
        if isinstance(self.segments, bool) or not isinstance(self.segments, int) or self.segments < 0:
            raise PolicyError(f"checkpoint: segments must be a positive whole number, not {self.segments!r}.")
        if not self.modules and not self.segments:
            raise PolicyError("checkpoint needs modules, such as 'layers.*', or segments, such as segments=4.")
        check_kinds(self.keep)

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Reads ``layers.*``, ``layers.*,head keep=matmul,attention``, ``segments=4`` or ``stages segments=2``.

        Raises:
            PolicyError: The text is invalid.
        """
        modules: list[str] = []
        settings = {"keep": "", "segments": ""}
        for word in text.split():
            setting, equals, value = word.partition("=")
            if not equals:
                modules += [part for part in re.split(r",(?![^\[]*\])", word) if part]
            elif setting in settings:
                settings[setting] = value
            else:
                raise PolicyError(
                    f"checkpoint: unknown setting {setting!r}; write keep=matmul,attention or segments=4."
                )
        if settings["segments"] and not re.fullmatch(r"[0-9]+", settings["segments"]):
            raise PolicyError(f"checkpoint: segments must be a positive whole number, not {settings['segments']!r}.")
        keep = tuple(kind for kind in settings["keep"].split(",") if kind)
        return cls(modules=tuple(modules), segments=int(settings["segments"] or 0), keep=keep)

    @classmethod
    def module_choices(cls, step: Step, call: range) -> tuple[Callable[[tuple[str, ...]], Policy], ...]:
        """Returns checkpoints of whole modules, and those that keep more and more of the modules' operators."""
        from memprof.policies.checkpoint.kept_sets import kept_sets

        return cls, *(partial(cls, keep=keep) for keep in kept_sets(step, call))

    def describe(self) -> str:
        """Returns a short description: ``checkpoint layers.* (keep matmul)``."""
        what = condensed(self.modules)
        if self.segments:
            what = f"{what} in {self.segments} segments" if what else f"{self.segments} segments"
        return f"checkpoint {what}" + (f" (keep {', '.join(map(short_kind, self.keep))})" if self.keep else "")


def split(count: int, segments: int) -> list[tuple[int, int]]:
    """Divides modules into consecutive segments of equal length, or with the first ones one module longer.

    Args:
        count: Number of modules.
        segments: Number of segments, at most ``count``.

    Returns:
        The first module of each segment and the one after its last.
    """
    size, longer = divmod(count, segments)
    edges = [number * size + min(number, longer) for number in range(segments + 1)]
    return list(pairwise(edges))


def longest_sequence(candidates: Sequence[tuple[str, int]]) -> str:
    """Returns the nn.Sequential with most modules, the first of several.

    Raises:
        PolicyError: There is none.
    """
    if not candidates:
        raise PolicyError(
            "segments requires an nn.Sequential, and the model has none; choose modules by patterns instead."
        )
    return max(candidates, key=lambda candidate: candidate[1])[0]
