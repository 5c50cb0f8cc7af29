"""The result of replaying a schedule: lives, memory and time."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.trace.schema import Bools, Ints


@dataclass(frozen=True, eq=False)
class Replay:
    """The result of replaying a schedule.

    A *life* is the lifetime of a value between one run of its operator and the last read of that run's output.

    Attributes:
        runs: The operators in order, shape ``(runs,)``.
        is_again: Which runs repeat an operator, shape ``(runs,)``.
        during_bytes: Allocated bytes during each run, workspace included, shape ``(runs,)``.
        life_value: The value of each life, ordered by value and birth, shape ``(lives,)``.
        life_born: The run that makes it.
        life_freed: The last run before it is freed; the number of runs where it outlives the step.
        read_run: Runs that read values, shape ``(reads,)``.
        read_life: The life each reads.
        extra_us: Time of the runs that repeat, in microseconds.
        stall_us: Time the step waits for copies of values offloaded to host memory.
    """

    runs: Ints
    is_again: Bools
    during_bytes: Ints
    life_value: Ints
    life_born: Ints
    life_freed: Ints
    read_run: Ints
    read_life: Ints
    extra_us: float
    stall_us: float = 0.0

    @property
    def peak_bytes(self) -> int:
        """Peak allocated bytes."""
        return int(self.during_bytes.max(initial=0))
