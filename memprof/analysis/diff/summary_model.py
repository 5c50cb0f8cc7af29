"""The summary of a recording: each phase's fullest moment, split every way, and what the figures depend on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from memprof.analysis.diff.traits import Traits

#: Name of the fullest moment overall, whatever its phase.
PEAK = "peak"

#: Name for the parts that are not listed one by one.
OTHERS = "(others)"


@dataclass(frozen=True)
class Spot:
    """A moment, and its live bytes.

    Attributes:
        bytes: Allocated bytes.
        phase: Its phase.
        op: The operator running.
        module: Its module, by name or the root's type; "" outside any module.
        line: The user's line of code, "" where unknown.
        file: Path of that line's file, as recorded.
        parts: Bytes by part, for each of ``splits.KINDS``; those of a kind sum to ``bytes``.
    """

    bytes: int
    phase: str
    op: str
    module: str
    line: str
    file: str = ""
    parts: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """The place in words: ``backward of layers.3``."""
        return self.phase + (f" of {self.module}" if self.module else "")


@dataclass(frozen=True)
class Summary:
    """The summary of a recording. See ``docs/diff.md`` for the JSON.

    Attributes:
        name: What was recorded, such as ``train.py``.
        frame: What its memory depends on besides the code: device, torch, CUDA, allocator settings, world size, batch
            (the inputs' shapes), memory events; as text.
        model: Type of the largest root module, "" where there is none.
        plan: The plan it ran under, in words.
        spots: PEAK, and the fullest moment of each phase.
        maxima: Each category's own maximum.
        step_time_us: Duration of a step without the recorder; NaN where unknown.
        recompute_time_us: Duration of the operators recomputed in backward; NaN where unknown.
        reserved_bytes: Peak reserved bytes of the allocator, -1 where it has none.
        parameter_bytes: Bytes of all parameters.
        dtypes: Bytes of each category by element type, at the category's own maximum.
        states: Keys of the optimizer's state, such as ``exp_avg``.
        step_peaks: Peak of each recorded step, in order.
        start_bytes: Allocated before the step's first operator.
        recomputed_ops: Operators recomputed in backward.
        rank_peaks: Peak of the fullest step of each rank.
        is_complete: Whether the recorded steps are complete.
        lines: Source file and line number by line name, for annotations.
        traits: Characteristics of the step besides its bytes.
        growth_bytes: Growth of live memory per step; NaN where unknown.
        lower_bound: Why its bytes are only a lower bound, as those of an incomplete history are, a clause; "" where
            they are not.
    """

    name: str
    frame: dict[str, str]
    model: str
    plan: str
    spots: dict[str, Spot]
    maxima: dict[str, int]
    step_time_us: float
    recompute_time_us: float
    reserved_bytes: int
    parameter_bytes: int
    dtypes: dict[str, dict[str, int]]
    states: tuple[str, ...]
    step_peaks: tuple[int, ...]
    start_bytes: int
    recomputed_ops: int
    rank_peaks: dict[str, int]
    is_complete: bool
    lines: dict[str, tuple[str, int]] = field(default_factory=dict)
    traits: Traits = field(default_factory=Traits)
    growth_bytes: float = math.nan
    lower_bound: str = ""

    @property
    def peak(self) -> Spot:
        """The fullest moment."""
        return self.spots[PEAK]
