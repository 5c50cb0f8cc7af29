"""The eviction heuristics of Dynamic Tensor Rematerialization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from memprof.trace.schema import Floats

_Numbers = TypeVar("_Numbers", float, Floats)

#: Added to staleness, in microseconds: values used last have none.
_LEAST_STALE_US = 1e-6


@dataclass(frozen=True)
class Heuristic:
    """What evicting a value costs, and whether stale values go first.

    Source: Kirisame 2021, section 4.1 and appendix C: h = cost / (bytes x staleness), least first, with staleness on a
    clock of summed operator time. The cost is the value's own recompute time and that of evicted values around it.

    Attributes:
        counts_sources: Whether the cost includes the evicted values it depends on.
        counts_dependants: Whether it includes the evicted values that depend on it.
        has_classes: Whether evicted neighbours are summed by equivalence class instead of being visited.
        is_stale_cheap: Whether h includes staleness.
    """

    counts_sources: bool
    counts_dependants: bool
    has_classes: bool = False
    is_stale_cheap: bool = True

    def h(self, cost_us: _Numbers, size_bytes: _Numbers, stale_us: _Numbers) -> _Numbers:
        """Returns h of a value, or of an array of values.

        Args:
            cost_us: Eviction cost.
            size_bytes: Size.
            stale_us: Operator time since the last use.
        """
        h = cost_us / size_bytes
        return h / (stale_us + _LEAST_STALE_US) if self.is_stale_cheap else h


#: By name. ``msps`` is the cost of Peng 2020, Capuchin: what recomputing the value itself takes.
HEURISTICS = {
    "eq-class": Heuristic(True, True, has_classes=True),
    "msps": Heuristic(True, False, is_stale_cheap=False),
    "local": Heuristic(False, False),
    "full": Heuristic(True, True),
}
