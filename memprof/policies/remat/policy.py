"""Enforces a memory budget: saved tensors are dropped when memory is short, and recomputed for backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Self

from memprof.errors import PolicyError, UsageError
from memprof.policies.base import Policy
from memprof.units import format_bytes, parse_bytes

HEURISTICS = ("eq-class", "msps")
SWAPS = ("", "host", "disk")


@dataclass(frozen=True)
class Remat(Policy):
    """Drops saved tensors when memory is short and recomputes them, operator by operator.

    Attributes:
        budget: Maximum bytes allocated at once, as text: ``8GiB``, or a share of the peak without the policy:
            ``60%``; "" if the plan names what is dropped.
        recompute: Keys of saved tensors that are always dropped and recomputed, whatever the budget:
            ``layers.0.mlp.1:aten.gelu.default:0``, the module, the operator, and the index of its run.
        heuristic: Eviction heuristic if the budget decides; one of HEURISTICS.
        swap: ``host`` or ``disk`` to move a victim there if that is faster than recomputing it.
        warn_factor: Ratio of recomputation time to first-run time at which to warn.
        exceeds: Whether to warn and go over the budget where nothing is left to drop, instead of ending the job.
    """

    name: ClassVar[str] = "remat"
    live_refusal: ClassVar[str] = "bytes held are counted from the job's first tensor on"
    dry_refusal: ClassVar[str] = (
        "it evicts by the memory in use and the measured time of operators, and a dry run has neither. Leave the "
        "policy out of the dry run, and predict it from its recording with memprof predict."
    )
    flag_help: ClassVar[str] = (
        "a hard memory cap, in bytes or as a share of the peak (60%): saved tensors are dropped when memory is short "
        "and recomputed for backward; :host or :disk moves them there instead if that is faster"
    )
    flag_example: ClassVar[str] = "8GiB"
    numerics: ClassVar[str] = "none"
    source: ClassVar[str] = "modelled"
    errors_seen: ClassVar[tuple[float, float]] = (0.01, 0.01)
    handles_saved: ClassVar[bool] = True
    why_not_torch: ClassVar[str] = "torch cannot drop and recompute single saved tensors to stay within a budget"
    excludes_sharding: ClassVar[bool] = True  # divided parameters are no storages of their own
    guesses: ClassVar[bool] = True  # the runtime needs room beyond the tensors it keeps, of unknown size
    starts_early: ClassVar[bool] = True  # allocated bytes are counted from before the job's first tensor

    budget: str = ""
    recompute: tuple[str, ...] = ()
    heuristic: str = "eq-class"
    swap: str = ""
    warn_factor: float = 2.0
    exceeds: bool = False

    def __post_init__(self) -> None:
        """Validates the settings."""
        if not self.budget and not self.recompute:
            raise PolicyError("remat needs a budget or a list of tensors to recompute: write budget = '8GiB'.")
        if self.budget.endswith("%"):
            if not 0 < self.budget_share <= 1:
                raise PolicyError(f"remat: invalid share {self.budget!r} of the peak; write budget = '60%'.")
        elif self.budget and self.budget_bytes <= 0:
            raise PolicyError("remat needs a positive budget; write budget = '8GiB'.")
        for key in self.recompute:
            if len(key.rsplit(":", 2)) != 3 or not key.rsplit(":", 1)[1].isdecimal():
                raise PolicyError(
                    f"remat: invalid key {key!r}; write module, operator and number: 'layers.0:aten.gelu.default:0'."
                )
        if self.heuristic not in HEURISTICS:
            raise PolicyError(f"remat: unknown heuristic {self.heuristic!r}; write {' or '.join(HEURISTICS)}.")
        if self.swap not in SWAPS:
            raise PolicyError(f"remat: unknown swap {self.swap!r}; write host or disk, or leave it out.")
        if not self.warn_factor > 0:
            raise PolicyError(f"remat: invalid warn_factor {self.warn_factor}; write warn_factor = 2.0.")

    @property
    def budget_bytes(self) -> int:
        """The budget, 0 if there is none, or if it is a share.

        Raises:
            PolicyError: The text is not a size.
        """
        if not self.budget or self.budget.endswith("%"):
            return 0
        try:
            return parse_bytes(self.budget)
        except UsageError as error:
            raise PolicyError(f"remat: invalid budget: {error}.") from None

    @property
    def budget_share(self) -> float:
        """The budget as a share of the peak without the policy: 0 if it is not a share, NaN if it is not a number."""
        if not self.budget.endswith("%"):
            return 0.0
        try:
            return float(self.budget[:-1]) / 100
        except ValueError:
            return math.nan

    def bytes_of(self, peak_bytes: int) -> int:
        """Returns the budget in bytes, 0 if there is none."""
        return int(peak_bytes * self.budget_share) or self.budget_bytes

    @property
    def held_bytes(self) -> int | None:
        """The budget, which the runtime enforces whatever the prediction, as long as anything is left to drop."""
        return self.budget_bytes or None

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Reads ``8GiB`` or ``60%``, optionally followed by ``:host`` or ``:disk``.

        Raises:
            PolicyError: The text is invalid.
        """
        size, _, to = text.partition(":")
        if to.strip() not in SWAPS:
            raise PolicyError(f"remat: unknown suffix {to.strip()!r} after ':'; write --remat {cls.flag_example}:disk.")
        if not size.strip():
            raise PolicyError(f"remat needs a budget; write --remat {cls.flag_example}.")
        return cls(budget=size.strip(), swap=to.strip())

    def describe(self) -> str:
        """Describes the budget, or what is recomputed."""
        if self.budget_share:
            parts = [f"within {self.budget} of the peak"]
        else:
            parts = [f"within {format_bytes(self.budget_bytes)}"] if self.budget else []
        if self.recompute:
            parts.append(f"{len(self.recompute)} saved tensors recomputed")
        if self.swap:
            parts.append(f"swap to {self.swap} if faster")
        return f"remat {', '.join(parts)}"
