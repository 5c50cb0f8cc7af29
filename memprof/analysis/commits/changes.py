"""Judges commits by gates, and finds those of a history at which a measure changed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from memprof.analysis.commits.history_file import Measurement
from memprof.analysis.diff.comparison import Diff, compare
from memprof.analysis.diff.explain import Cause, explain
from memprof.analysis.diff.gates import Gate, measure
from memprof.analysis.diff.summary import Summary


@dataclass(frozen=True)
class Step:
    """A change from one measured commit to the next.

    Attributes:
        before: The earlier commit.
        after: The commit at which the measure changed.
        base: The measure before, in bytes or microseconds.
        head: The measure after.
        causes: What changed, the likeliest cause first.
    """

    before: Measurement
    after: Measurement
    base: float
    head: float
    causes: tuple[Cause, ...]

    @property
    def change(self) -> float:
        """What was added; negative for a decrease."""
        return self.head - self.base


def compare_commits(base: Summary, head: Summary, *, fail: Sequence[Gate] = ()) -> Diff:
    """Compares one job at two commits. A model whose class was renamed is compared all the same.

    Args:
        base: The job at the earlier commit.
        head: The job at the later one.
        fail: Gates that are judged.

    Raises:
        UsageError: A gate names a phase that neither has.
    """
    return compare([dataclasses.replace(base, model="")], [head], fail=fail)


def steps_in(history: Sequence[Measurement], gate: Gate, least_share: float) -> list[Step]:
    """Finds the commits at which a measure changed, compared with the measured commit before.

    Args:
        history: The measurements, in the order of the commits.
        gate: What is measured.
        least_share: Smallest change that counts, as a share of the value before.
    """
    found = []
    for before, after in pairwise([one for one in history if one.summary is not None]):
        assert before.summary is not None
        assert after.summary is not None
        base, head = measure(gate, before.summary), measure(gate, after.summary)
        if math.isnan(base) or math.isnan(head) or base == head or abs(head - base) < least_share * base:
            continue
        found.append(Step(before, after, base, head, explain(compare_commits(before.summary, after.summary))))
    return found
