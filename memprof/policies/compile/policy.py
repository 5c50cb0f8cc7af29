"""Compiles chosen modules, with a budget for the activations they save."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from memprof.errors import PolicyError
from memprof.policies.base import Policy
from memprof.policies.plan.patterns import condensed

if TYPE_CHECKING:
    from memprof.trace.step import Step


#: Inductor's limit, in GiB, of what fused kernels may add to a graph's peak; from torch 2.15 on.
FUSION = "fusion_memory_timeline_peak_memory_increase_gb"
#: Begins the limit of fusion in the policy's flag.
_FUSION = "fusion="


@dataclass(frozen=True)
class Compile(Policy):
    """Compiles chosen modules, with a budget for the activations they save.

    What a compiler keeps and recomputes is known only after a run: a plan that compiles is predicted from a recording
    of itself.

    Attributes:
        modules: Patterns of the modules to compile; "" is the whole model.
        activation_budget: Fraction of the saved bytes of its default plan that the compiler may keep, 0 to 1.
        fusion_gb: GiB by which fused kernels may raise a graph's peak; below 0 for torch's default, no limit.
        measured: Path of a recording made under the whole plan, "" without one.
    """

    name: ClassVar[str] = "compile"
    changes_kernels: ClassVar[bool] = True
    live_refusal: ClassVar[str] = "its effect can only be measured"
    set_in_framework: ClassVar[Mapping[str, str]] = {
        "hf": "the Trainer compiles the model itself. Set torch_compile=True.",
        "lightning": "compile the model itself: torch.compile(module).",
    }
    flag_help: ClassVar[str] = (
        "Compile matching modules, comma separated ('.' is the whole model); append @ and a share from 0 to 1 to set "
        "an activation budget; add fusion=0 to fuse no kernels that raise the peak (torch 2.15)."
    )
    flag_example: ClassVar[str] = "'layers.*@0.5'"
    numerics: ClassVar[str] = "rounding"
    source: ClassVar[str] = "measured"
    errors_seen: ClassVar[tuple[float, float]] = (0.01, 0.01)
    why_not_torch: ClassVar[str] = ""

    modules: tuple[str, ...] = ("",)
    activation_budget: float = 1.0
    fusion_gb: float = -1.0
    measured: str = ""

    def __post_init__(self) -> None:
        """Checks the settings."""
        if not isinstance(self.modules, tuple) or not self.modules:
            raise PolicyError("compile needs modules; write patterns such as 'layers.*', or '' for the model.")
        budget = self.activation_budget
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
            raise PolicyError(f"compile: invalid activation budget {budget!r}; write a share from 0 to 1.")
        limit = self.fusion_gb
        if isinstance(limit, bool) or not isinstance(limit, int | float) or not math.isfinite(limit):
            raise PolicyError(f"compile: invalid fusion_gb {limit!r}; write GiB, such as 0.5, or 0.")

    @property
    def is_plain(self) -> bool:
        """Whether it leaves to torch what is kept for backward, and which kernels are fused."""
        return self.activation_budget == 1 and self.fusion_gb < 0

    def refusal_within(self, plan: Sequence[Policy]) -> str:
        """Returns that the measured run is one of other policies, where it is."""
        if not self.measured or not Path(self.measured).exists():
            return ""
        recorded = self._module("transform").measured_policies(self.measured)
        mine, its = _before_compiling(plan), _before_compiling(recorded or ())
        if recorded is None or mine == its:
            return ""
        return (
            f"the measured run {self.measured} was recorded under {_listed(its)} before it was compiled, this plan has "
            f"{_listed(mine)}: record the job under the whole plan."
        )

    @classmethod
    def from_flag(cls, text: str) -> Self:
        """Reads ``layers.*@0.5`` or ``layers.*@0.5,fusion=0``.

        Raises:
            PolicyError: What follows the @ is no number from 0 to 1, or what follows fusion= is none of 0 or more.
        """
        text, limits, limit = text.partition(f",{_FUSION}")
        try:
            fusion = float(limit) if limits else -1.0
        except ValueError:
            fusion = -1.0
        if limits and fusion < 0:
            raise PolicyError(f"compile: invalid limit {limit!r} of fusion; write GiB, such as ',fusion=0'.")
        patterns, has_budget, budget = text.partition("@")
        try:
            share = float(budget) if has_budget else 1.0
        except ValueError:
            raise PolicyError(f"compile: invalid activation budget {budget!r}; write a share from 0 to 1.") from None
        modules = tuple(part.strip() for part in patterns.split(",") if part.strip())
        return cls(tuple("" if part == "." else part for part in modules) or ("",), share, fusion)

    def changes(self, step: Step) -> tuple[str, ...]:
        """Returns that compiled dropout draws its own random numbers."""
        from memprof.policies.rewrite.stack_marks import draws

        return ("compiled code draws other random numbers",) if draws(step) else ()

    def describe(self) -> str:
        """Returns a short description: ``compile layers.* at 0.5``."""
        names = condensed(self.modules)
        limit = f", fusion {'without' if not self.fusion_gb else f'up to {self.fusion_gb:g} GiB of'} growth of the peak"
        return (
            f"compile {names}"
            + (f" at {self.activation_budget:g}" if self.activation_budget < 1 else "")
            + (limit if self.fusion_gb >= 0 else "")
        )


def _before_compiling(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """Returns the policies that come before the compiler's, whose effect a measured run includes."""
    return tuple(itertools.takewhile(lambda policy: not isinstance(policy, Compile), policies))


def _listed(policies: Sequence[Policy]) -> str:
    return ", ".join(policy.describe() for policy in policies) or "no other policy"
