"""A plan that was replayed, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memprof.policies.base import NUMERICS, SOURCES, Policy
from memprof.policies.plan import Plan
from memprof.replay.live import live_bytes, live_bytes_by_category
from memprof.trace.schema import NONE
from memprof.trace.step import Step


@dataclass(frozen=True)
class Tried:
    """A plan, and the step it leads to in numbers.

    Attributes:
        policies: Its policies, in their order.
        peak_bytes: Peak of allocated bytes.
        step_time_us: Duration of the step.
        peak_phase: Phase the peak is in.
        peak_module: Module that runs there, "" outside of modules.
        peak_op: Operator that runs there.
        categories: Bytes at the peak, by category.
    """

    policies: tuple[Policy, ...]
    peak_bytes: int
    step_time_us: float
    peak_phase: str
    peak_module: str
    peak_op: str
    categories: dict[str, int] = field(default_factory=dict, compare=False)

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return Plan(self.policies)

    @property
    def numerics(self) -> str:
        """What it does to the numbers the job computes: the most of what its policies do."""
        return max((policy.numerics for policy in self.policies), key=NUMERICS.index, default=NUMERICS[0])

    @property
    def source(self) -> str:
        """How its numbers were obtained: the least sure of its policies' ways."""
        return max((policy.source for policy in self.policies), key=SOURCES.index, default=SOURCES[0])


def tried(policies: tuple[Policy, ...], step: Step) -> Tried:
    """Reads the numbers off a step that was predicted."""
    during = live_bytes(step).during
    peak = int(np.argmax(during))
    module = int(step.ops.module_id[peak])
    return Tried(
        policies=policies,
        peak_bytes=int(during[peak]),
        step_time_us=float(step.duration_us),
        peak_phase=str(step.ops.phase[peak]),
        peak_module=str(step.modules.name[module]) if module != NONE else "",
        peak_op=str(step.ops.name[peak]),
        categories={name: int(values[peak]) for name, values in live_bytes_by_category(step).items() if values[peak]},
    )
