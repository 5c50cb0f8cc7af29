"""What a recording comes to: each phase's fullest moment, split every way, and what the figures depend on."""

from __future__ import annotations

from dataclasses import dataclass, field

from memprof.analysis.diff.traits import Traits

#: Name of the fullest moment of all, whatever phase it is in.
PEAK = "peak"

#: What the parts that are not told one by one are called.
OTHERS = "(others)"


@dataclass(frozen=True)
class Spot:
    """A moment, and what is held there.

    Attributes:
        bytes: Allocated bytes.
        phase: Its phase.
        op: The operator that runs.
        module: Its module, by name or the root's type; "" outside of any.
        line: The user's line of code, "" where none is known.
        file: The path of that line's file as recorded.
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
        """Where it is: ``backward of layers.3``."""
        return self.phase + (f" of {self.module}" if self.module else "")


@dataclass(frozen=True)
class Summary:
    """What a recording comes to. See ``docs/diff.md`` for the JSON.

    Attributes:
        name: What was recorded, such as ``train.py``.
        frame: What its memory depends on beside the code: device, torch, CUDA, allocator settings, world size, batch
            (the inputs' shapes), memory events; as text.
        model: Type of the largest root module, "" where there is none.
        plan: The plan it ran under, in words.
        spots: PEAK, and the fullest moment of each phase.
        maxima: Each category's own maximum.
        step_time_us: How long a step takes without the recorder; NaN where unknown.
        recompute_time_us: Time of the operators that run again in backward; NaN where unknown.
        reserved_bytes: Most bytes the allocator held, -1 where it has no such number.
        parameter_bytes: Bytes of all parameters.
        dtypes: Bytes of each category by element type, at the category's own maximum.
        states: Keys of the optimizer's state, such as ``exp_avg``.
        step_peaks: Peak of each recorded step, in order.
        start_bytes: Allocated before the step's first operator.
        recomputed_ops: Operators that run again in backward.
        rank_peaks: Peak of the fullest step by rank, of all ranks.
        is_complete: Whether the recording saw its steps to their end.
        lines: Source file and line number by the name of a line, for annotations.
        traits: What the step is like beside its bytes.
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

    @property
    def peak(self) -> Spot:
        """The fullest moment."""
        return self.spots[PEAK]
