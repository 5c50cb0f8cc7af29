"""Times of a step and of its operators at a size, as far as the recordings determine them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from memprof.planners.scaling.curves import growing, smoothed
from memprof.planners.scaling.samples import Sample
from memprof.trace.schema import Bools, Floats, Ints

#: Above this share of operators with identical times in two steps, both are from a single measurement.
_SAME = 0.5


@dataclass(frozen=True, eq=False)
class Clock:
    """Estimates times at a size.

    A recording that measures its operators' times in one step assigns them to all its steps, whatever their sizes; that
    step is assumed to be of the middle size. With only one such recording, times grow with the bytes that operators
    touch.

    Attributes:
        samples: The steps, in ascending size.
        rows: Row of each matched operator in every sample, shape ``(samples, operators)``.
    """

    samples: tuple[Sample, ...]
    rows: Ints

    @cached_property
    def timed(self) -> tuple[int, ...]:
        """Indices of the samples whose times are used: among steps measured once, the middle one."""
        places: list[int] = []
        for run in dict.fromkeys(sample.run for sample in self.samples):
            own = [place for place, sample in enumerate(self.samples) if sample.run == run]
            middle = own[len(own) // 2]
            places += [middle] if self._measured_once(own) else own
        return tuple(sorted(places))

    @property
    def is_guessed(self) -> bool:
        """Whether times are known at one size only, so that their growth is a guess."""
        return len({self.samples[place].size for place in self.timed}) < 2

    def times_at(self, size: int, touched: Floats) -> tuple[float, Floats]:
        """Returns the duration of the step at a size, and the times of the matched operators.

        Args:
            size: The size.
            touched: Bytes each operator touches in every sample and at the size, shape ``(samples + 1, operators)``.
        """
        places = list(self.timed)
        times = self._times(places)
        sizes = np.array([self.samples[place].size for place in places], dtype=np.float64)
        if self.is_guessed:
            before = touched[places].mean(axis=0)
            grows = np.divide(touched[-1], before, out=np.ones(len(before)), where=before > 0)
            found = times.mean(axis=0) * grows
        else:
            every = np.array([*(sample.size for sample in self.samples), size], dtype=np.float64)
            grows_with = np.where(self._grow_faster(touched, size), touched, every[:, None])
            values, points = _by_size(times, grows_with[places], sizes)
            follow = growing if len(values) == 2 else smoothed
            found = follow(points, values, grows_with[-1])
        return self._duration_at(size, sizes, times, found), found

    def _duration_at(self, size: int, sizes: Floats, times: Floats, found: Floats) -> float:
        durations = np.array([[self.samples[place].step.duration_us] for place in self.timed])
        own_runs = len({sample.run for sample in self.samples})
        if own_runs == len(self.timed) and not self.is_guessed:
            values, points = _by_size(durations, sizes[:, None], sizes)
            follow = growing if len(values) == 2 else smoothed
            return float(follow(points, values, np.array([float(size)]))[0])
        # All steps of a recording have the duration of those that were not recorded, of whatever sizes.
        recorded = float(np.nansum(times, axis=1).mean())
        return float(durations.mean()) * (float(np.nansum(found)) / recorded if recorded else 1.0)

    def _grow_faster(self, touched: Floats, size: int) -> Bools:
        """Returns which operators touch bytes that grow faster than the size."""
        first, last = touched[0], touched[len(self.samples) - 1]
        smallest, largest = self.samples[0].size, self.samples[-1].size
        faster: Bools = last * smallest > first * largest * (1 + 1e-9)
        return faster & (size > 0)

    def _measured_once(self, places: Sequence[int]) -> bool:
        """Whether some samples share the times of a single step."""
        if len(places) < 2 or not self.rows.shape[1]:
            return False
        table = self._times(places)
        return bool((table == table[0]).all(axis=0).mean() > _SAME)

    def _times(self, places: Sequence[int]) -> Floats:
        return np.stack([self.samples[place].step.ops.duration_us[self.rows[place]] for place in places])


def _by_size(values: Floats, points: Floats, sizes: Floats) -> tuple[Floats, Floats]:
    """Returns the means of rows of equal size, and of the values that go with them."""
    distinct = np.unique(sizes)
    means = [np.stack([table[sizes == one].mean(axis=0) for one in distinct]) for table in (values, points)]
    return means[0], means[1]
