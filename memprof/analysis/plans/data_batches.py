"""The batches of a job's data over an epoch: their sizes, and the one that peaks highest."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memprof.analysis.allocator.device_verdict import dry_fit
from memprof.errors import InconclusiveError
from memprof.trace.schema import Ints, Steps
from memprof.trace.store import Trace
from memprof.units import format_bytes

#: A batch is like the worst if its parts are at least this share of that one's, in elements and in length.
_ALIKE = 0.98
#: A peak that is higher by less than this share is not called worse.
_SLIGHT = 0.005


@dataclass(frozen=True)
class Part:
    """Sizes of one part of the batches, in elements.

    Attributes:
        name: Its name, such as ``input_ids`` or ``[1][*].boxes``.
        least: The smallest.
        median: The median.
        p90: That of one in ten batches is larger.
        p99: That of one in a hundred is.
        most: The largest.
        typical_shape: Its shape in a typical batch.
        worst_shape: Its shape in the batch that peaks highest.
    """

    name: str
    least: int
    median: int
    p90: int
    p99: int
    most: int
    typical_shape: str
    worst_shape: str


@dataclass(frozen=True)
class DataBatches:
    """What a job's data needs.

    Attributes:
        line: File and line of the loop over the training loader; "" where the job has none.
        batches: Batches of an epoch, or steps of the loop; -1 where the loader does not say.
        batches_read: How many of them were read.
        seconds: Time that reading them took.
        is_shuffled: Another epoch has its samples in other batches.
        parts: The parts of the batches; empty without a loader.
        steady_bytes: Peak of a step on a typical batch.
        worst_bytes: Peak of a step on the worst batch.
        worst_batch: Its place in the epoch, from 0; in a loop without a loader, its step.
        alike: Batches read that are as large in each part, the worst among them; others may peak as high.
        fits: Whether the simulated device holds it; "" on the CPU.
        untried: Batches chosen that the job did not come to.
    """

    line: str
    batches: int
    batches_read: int
    seconds: float
    is_shuffled: bool
    parts: tuple[Part, ...]
    steady_bytes: int
    worst_bytes: int
    worst_batch: int
    alike: int
    fits: str = ""
    untried: int = 0

    @property
    def is_uneven(self) -> bool:
        """Whether the worst batch peaks higher than a typical one."""
        return self.worst_bytes > self.steady_bytes * (1 + _SLIGHT)

    @property
    def probability(self) -> float:
        """Share of the batches that are like the worst; a lower bound."""
        return self.alike / max(self.batches_read, 1)

    def describe(self) -> str:
        """Returns the verdict: ``Steady 18.20 GiB, worst batch 21.30 GiB (at least 1 in 400 batches: batch 7).``."""
        steady, unit = format_bytes(self.steady_bytes), "batches" if self.line else "steps"
        if not self.is_uneven:
            return (
                f"Steady {steady}; none of the largest of {self.batches_read:,} batches read needs more."
                if self.line
                else f"Steady {steady}; no step of {self.batches_read:,} dry-run needs more."
            )
        often = f"{'at least ' if self.line else ''}1 in {max(1, round(1 / self.probability)):,} {unit}"
        which = f"{'batch' if self.line else 'step'} {self.worst_batch:,}"
        worst = f"worst {'batch' if self.line else 'step'} {format_bytes(self.worst_bytes)}"
        return f"Steady {steady}, {worst} ({often}: {which})."

    def describe_reading(self) -> tuple[str, ...]:
        """Returns what was read, and what another epoch may bring."""
        if not self.line:
            what = f"No DataLoader was found around the job's steps: {self.batches_read:,} of them were dry-run."
            return what, "Sizes that depend on computed values are placeholders."
        of_all = "an unknown number of" if self.batches < 0 else f"{self.batches:,}"
        if self.batches_read == self.batches:
            found = [f"All {self.batches:,} batches of an epoch read in {self.seconds:.1f} s ({self.line})."]
        else:
            what = f"Sampled {self.batches_read:,} of {of_all} batches in {self.seconds:.1f} s ({self.line})"
            found = [f"{what}: a larger one may be among the others (--seconds reads more)."]
        if self.untried:
            found.append(f"The loop ended before {self.untried} of the largest batches were trained on.")
        if self.is_shuffled and self.is_uneven:
            found.append("The loader shuffles or samples: batches of other epochs differ, and may be larger.")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Returns the result ready for ``json.dump``."""
        own = asdict(self)
        return {"schema": 1, **own, "is_uneven": self.is_uneven, "probability": self.probability}


def of_survey(read: dict[str, Any], trace: Trace) -> DataBatches:
    """Returns the result for a training loader.

    Args:
        read: What was read, as written by the dry run.
        trace: The dry run of the chosen batches.

    Raises:
        InconclusiveError: A typical batch did not make two complete steps.
    """
    peaks = trace.step_peaks()
    own = [(max(peaks.get(step, 0), peaks.get(step + 1, 0)), place) for place, step in read["steps"]]
    if not own or not own[0][0]:
        why = "trained in fewer than two steps on a typical batch, or allocated nothing on the simulated device"
        raise InconclusiveError(f"the job {why}.")
    worst, at_worst = max(own, key=lambda one: one[0])
    rows = [read["index"].index(place) for place in (own[0][1], at_worst)]
    names = sorted({name for sizes in read["sizes"] for name in sizes})
    sizes = {name: np.array([one.get(name, (0, 0)) for one in read["sizes"]]) for name in names}
    typical_shapes, worst_shapes = (read["shapes"][row] for row in rows)
    is_alike = [(of_part >= _ALIKE * of_part[rows[1]]).all(axis=1) for of_part in sizes.values()]
    return DataBatches(
        line=read["line"],
        batches=read["batches"],
        batches_read=len(read["index"]),
        seconds=read["seconds"],
        is_shuffled=read["is_shuffled"],
        parts=tuple(
            _part(name, of_part[:, 0], typical_shapes.get(name, ""), worst_shapes.get(name, ""))
            for name, of_part in sizes.items()
        ),
        steady_bytes=own[0][0],
        worst_bytes=worst,
        worst_batch=at_worst,
        alike=int(np.all(is_alike, axis=0).sum()),
        fits=_describe_fit(trace),
        untried=read["chosen"] - len(read["steps"]),
    )


def _part(name: str, sizes: Ints, typical_shape: str, worst_shape: str) -> Part:
    least, median, p90, p99, most = (
        int(np.quantile(sizes, share, method="higher")) for share in (0, 0.5, 0.9, 0.99, 1)
    )
    return Part(name, least, median, p90, p99, most, typical_shape, worst_shape)


def of_loop(trace: Trace) -> DataBatches:
    """Returns the result for a loop that makes its batches itself, from a dry run of its steps.

    Raises:
        InconclusiveError: Fewer than two steps were dry-run.
    """
    steps = trace.table(Steps)
    whole = set(steps.step[steps.is_complete].tolist())  # the part after the last update is none
    peaks = {step: peak for step, peak in trace.step_peaks().items() if step in whole}
    first = min(peaks, default=0)  # creates the optimizer state
    later = {step: peak for step, peak in peaks.items() if step > first}
    if not later:
        raise InconclusiveError("the job made fewer than two training steps in a dry run.")
    worst = max(later, key=lambda step: later[step])
    return DataBatches(
        line="",
        batches=len(peaks),
        batches_read=len(peaks),
        seconds=0.0,
        is_shuffled=False,
        parts=(),
        steady_bytes=int(np.quantile(list(later.values()), 0.5, method="lower")),
        worst_bytes=later[worst],
        worst_batch=worst,
        alike=sum(peak >= _ALIKE * later[worst] for peak in later.values()),
        fits=_describe_fit(trace),
    )


def _describe_fit(trace: Trace) -> str:
    fit = dry_fit(trace)
    return "" if fit is None else fit.describe()
