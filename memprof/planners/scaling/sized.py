"""A step as a function of its size, from steps at two or more sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from memprof.errors import InconclusiveError, UsageError
from memprof.planners.scaling.base import InferredBatch, check_size, resized
from memprof.planners.scaling.curves import Fit, along, fit, grow_in_two, grown_shapes
from memprof.planners.scaling.match import Match, match_steps
from memprof.planners.scaling.samples import Sample
from memprof.planners.scaling.times import Clock
from memprof.trace.schema import Bools, Floats, Ints, Memory, Ops
from memprof.trace.step import Step

#: Operator columns that scale with its bytes.
_COUNTS = ("workspace_bytes", "flops", "read_bytes", "written_bytes")


@dataclass(frozen=True, eq=False)
class MeasuredSizes:
    """A step at any size, fitted to steps at two or more sizes over their common operators and storages.

    Where a storage's shape gives its bytes, each of its dimensions grows linearly: two dimensions that grow with the
    size make the bytes quadratic. Elsewhere the bytes are fitted (``curves.fit``), and so are an operator's workspace
    and work. Storages a step inherits from the one before (its batch, its loss) are as large as those it leaves: the
    previous step is assumed to have the same size.

    Limitation: a kernel may switch to another algorithm, with more or less workspace, at a size in between or beyond;
    only a recording near that size shows it. On a CPU with one thread, torch 2.13 runs 1x1 convolutions with oneDNN
    from a batch of 16 (``use_mkldnn`` in ATen's Convolution.cpp), which made the peak of a U-Net 3.8 % larger than
    predicted; oneDNN pads an LSTM's workspace to pages, which made 1.0 %.

    Attributes:
        samples: The steps, in ascending size; several may have the same size.
        match: The matching rows.
        may_be_square: Whether bytes that no shape gives may be quadratic in the size.
        source: Source of other sizes, of policies.base.SOURCES.
    """

    source: ClassVar[str] = "modelled"
    samples: tuple[Sample, ...]
    match: Match
    may_be_square: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The recorded sizes, ascending."""
        return tuple(sorted({sample.size for sample in self.samples}))

    def step_at(self, size: int) -> Step:
        """Returns the step at a size; recorded sizes return the recorded bytes.

        Raises:
            UsageError: The size is not positive.
        """
        return self.learned(size)

    def learned(self, size: int, *, at_most: bool = False, without: int | None = None) -> Step:
        """Returns the step at a size, from all samples or some.

        Args:
            size: The size.
            at_most: Use the upper bound where the samples are not sufficient.
            without: Leave out the samples of this size.

        Raises:
            UsageError: The size is not positive.
        """
        check_size(size)
        kept = np.array([sample.size != without for sample in self.samples])
        found, shape = self._storages(size, kept)
        base = self._base.storages
        rows = self.match.storages[-1]
        requested = base.requested_bytes.copy()
        # Fits lose less than a byte to floating point.
        requested[rows] = np.maximum(np.ceil((found.most if at_most else found.likely) - 1e-3), 0).astype(np.int64)
        touched = self._touched(requested[rows])
        clock = Clock(
            tuple(sample for sample, keeps in zip(self.samples, kept, strict=True) if keeps), self.match.ops[kept]
        )
        ops = self._ops(size, kept, touched, at_most=at_most)
        duration_us, op_times = clock.times_at(size, touched[np.append(kept, True)])
        durations = ops.duration_us.copy()
        durations[self.match.ops[-1]] = op_times
        return dataclasses.replace(
            self._base,
            duration_us=duration_us,
            ops=ops.replace(duration_us=durations),
            storages=resized(base, requested, shape),
            memory=Memory.empty(),
        )

    def guessed(self, size: int) -> Bools:
        """Returns which storages of the step have no sure size there, shape ``(storages,)``."""
        is_guessed = np.zeros(len(self._base.storages), dtype=np.bool_)
        is_guessed[self.match.storages[-1]] = ~self._storages(size, np.ones(len(self.samples), dtype=np.bool_))[
            0
        ].is_sure
        return is_guessed

    def guessed_ops(self, size: int) -> Bools:
        """Returns which operators have no sure workspace there, shape ``(ops,)``."""
        rows = zip(self.samples, self.match.ops, strict=True)
        values = np.stack([sample.step.ops.workspace_bytes[row] for sample, row in rows])
        is_guessed = np.zeros(len(self._base.ops), dtype=np.bool_)
        is_guessed[self.match.ops[-1]] = ~self._fitted(values, [one.size for one in self.samples], size).is_sure
        return is_guessed

    @property
    def _base(self) -> Step:
        """The template step: the last of the largest."""
        return self.samples[-1].step

    @cached_property
    def _links(self) -> Ints:
        return _linked(self.samples, self.match.storages)

    def _storages(self, size: int, kept: Bools) -> tuple[Fit, np.ndarray]:
        rows = self.match.storages
        steps = [sample.step for sample in self.samples]
        recorded = np.stack([step.storages.requested_bytes[row] for step, row in zip(steps, rows, strict=True)])[kept]
        texts = [
            step.storages.shape[row].astype(str) for step, row, keeps in zip(steps, rows, kept, strict=True) if keeps
        ]
        sizes = [sample.size for sample, keeps in zip(self.samples, kept, strict=True) if keeps]
        fitted = self._fitted(recorded, sizes, size)
        shapes, exact, is_known = grown_shapes(texts, recorded.astype(np.float64), sizes, size)
        found = Fit(
            np.where(is_known, exact, fitted.likely),
            np.where(is_known, exact, fitted.most),
            fitted.is_sure | is_known,
        )
        is_made = self._base.storages.created_op_id[rows[-1]] >= 0
        source = _spread(self._links, found.is_sure, is_made)
        shape = self._base.storages.shape.copy()
        has_shape = is_known[source]
        shape[rows[-1][has_shape]] = shapes[source][has_shape]
        return Fit(found.likely[source], found.most[source], found.is_sure[source]), shape

    def _fitted(self, values: np.ndarray, sizes: Sequence[int], size: int) -> Fit:
        """Fits columns of numbers, shape ``(steps, columns)``."""
        distinct = sorted(set(sizes))
        of = np.array(sizes)
        low = np.stack([values[of == one].min(axis=0) for one in distinct]).astype(np.float64)
        high = np.stack([values[of == one].max(axis=0) for one in distinct]).astype(np.float64)
        points = np.array(distinct, dtype=np.float64)
        return fit(points, low, high, float(size), may_be_square=self.may_be_square)

    def _ops(self, size: int, kept: Bools, touched: Floats, *, at_most: bool) -> Ops:
        base, rows = self._base.ops, self.match.ops
        steps = [sample.step for sample in self.samples]
        sizes = [sample.size for sample, keeps in zip(self.samples, kept, strict=True) if keeps]
        changed = {}
        for name in _COUNTS:
            values = np.stack([getattr(step.ops, name)[row] for step, row in zip(steps, rows, strict=True)])[kept]
            fitted = self._fitted(values, sizes, size)
            there = fitted.most if at_most else fitted.likely
            if len(set(sizes)) == 2 and not at_most:
                there = self._between_two(values.astype(np.float64), sizes, size, touched[np.append(kept, True)])
            # Workspace is negative only where it was recorded so.
            there = np.where((values >= 0).all(axis=0), np.maximum(there, 0.0), there)
            column = getattr(base, name).copy()
            column[rows[-1]] = np.rint(there).astype(np.int64)
            changed[name] = column
        return base.replace(**changed)

    def _between_two(self, values: Floats, sizes: Sequence[int], size: int, touched: Floats) -> Floats:
        """Interpolates operator columns along the size, or along the touched bytes where those are quadratic in it.

        Args:
            values: The operator columns, shape ``(steps, operators)``.
            sizes: The size of each step; there are two.
            size: The size to evaluate.
            touched: Bytes they touch in the steps and at the size, shape ``(steps + 1, operators)``.
        """
        ends = [0, len(sizes) - 1]
        points = np.where(self._is_square, touched, np.array([*sizes, size], dtype=np.float64)[:, None])
        found: Floats = along(points[ends], values[ends], points[-1])
        return found

    @cached_property
    def _is_square(self) -> Bools:
        """Which matched operators touch storages quadratic in the size."""
        rows = self.match.storages
        ends = (0, len(self.samples) - 1)
        first, last = (self.samples[end].step.storages.shape[rows[end]] for end in ends)
        op, storage = self._uses
        square: Bools = np.bincount(op, grow_in_two(first, last)[storage], self.match.ops.shape[1]) > 0
        return square

    @cached_property
    def _uses(self) -> tuple[Ints, Ints]:
        """The matched operators and storages of uses where both are matched, as columns of the match."""
        position = np.full(len(self._base.ops), -1)
        position[self.match.ops[-1]] = np.arange(self.match.ops.shape[1])
        place = np.full(len(self._base.storages), -1)
        place[self.match.storages[-1]] = np.arange(self.match.storages.shape[1])
        uses = self._base.uses
        is_known = (position[uses.op_id] >= 0) & (place[uses.storage_id] >= 0)
        return position[uses.op_id[is_known]], place[uses.storage_id[is_known]]

    def _touched(self, there: Ints) -> Floats:
        op, storage = self._uses
        rows = zip(self.samples, self.match.storages, strict=True)
        every = [*(sample.step.storages.requested_bytes[row] for sample, row in rows), there]
        return np.stack([np.bincount(op, each[storage], self.match.ops.shape[1]) for each in every])


#: A step at any size.
SizedStep = InferredBatch | MeasuredSizes


def scale_samples(samples: Sequence[Sample], *, may_be_square: bool = False, what: str = "size") -> MeasuredSizes:
    """Fits how a job's step grows; steps that hold other tensors than the largest are left out.

    Args:
        samples: The steps, of at least two sizes.
        may_be_square: Whether bytes that no shape gives may be quadratic in the size, as in a sequence length.
        what: What the size is, for messages.

    Raises:
        UsageError: There are fewer than two sizes, or one that is not positive.
        InconclusiveError: The steps do not run the same operators, or do not hold the same tensors.
    """
    ordered = sorted(samples, key=lambda one: one.size)
    if len({one.size for one in ordered}) < 2:
        raise UsageError("scaling a step needs two recordings at different sizes.")
    check_size(ordered[0].size)
    try:
        return MeasuredSizes(tuple(ordered), _matched(ordered, what), may_be_square)
    except InconclusiveError:
        kept = [one for one in ordered[:-1] if _does_match(one, ordered[-1], what)] + ordered[-1:]
        if len({one.size for one in kept}) < 2 or len(kept) == len(ordered):
            raise
    return MeasuredSizes(tuple(kept), _matched(kept, what), may_be_square)


def _matched(samples: Sequence[Sample], what: str) -> Match:
    return match_steps([one.step for one in samples], [f"{what} {one.size}" for one in samples])


def _does_match(one: Sample, largest: Sample, what: str) -> bool:
    try:
        _matched((one, largest), what)
    except InconclusiveError:
        return False
    return True


def _linked(samples: Sequence[Sample], rows: Ints) -> Ints:
    """Finds matched storages that are identical in two consecutive steps of a recording.

    Args:
        samples: The steps.
        rows: Row of each matched storage in each, shape ``(steps, storages)``.

    Returns:
        Pairs of columns of ``rows``, one in the earlier step and one in the next, each once, shape ``(2, pairs)``.
    """
    place = {(one.run, one.step.number): number for number, one in enumerate(samples)}
    pairs = [np.empty((2, 0), dtype=np.int64)]
    for (run, number), earlier in place.items():
        later = place.get((run, number + 1))
        if later is None:
            continue
        before, after = (samples[each].step.storage_ids[rows[each]] for each in (earlier, later))
        _, left, right = np.intersect1d(before, after, return_indices=True)
        pairs.append(np.stack([left, right])[:, left != right])
    return np.unique(np.concatenate(pairs, axis=1), axis=1)


def _spread(links: Ints, is_sure: Bools, is_made: Bools) -> Ints:
    """Determines which storage's size gives the size of each: its own, or that of a predecessor or successor.

    Storages a step finds have the size of those steps make, where that is sure. Storages a step makes for the next,
    such as a prefetched batch, are as large as those it found itself.

    Args:
        links: Result of ``_linked``.
        is_sure: Which storages' own sizes are known, shape ``(storages,)``.
        is_made: Which storages are made in the step.

    Returns:
        The column that gives the size of each, shape ``(storages,)``.
    """
    source = np.arange(len(is_sure))
    is_settled = is_sure & is_made
    is_known = is_sure.copy()
    for _ in range(links.shape[1]):
        earlier, later = links
        forth = is_settled[earlier] & ~is_settled[later]
        back = is_known[later] & ~is_known[earlier]
        if not (forth | back).any():
            break
        source[later[forth]] = source[earlier[forth]]
        is_settled[later[forth]] = is_known[later[forth]] = True
        back &= ~is_known[earlier]
        source[earlier[back]] = source[later[back]]
        is_settled[earlier[back]] = is_known[earlier[back]] = True
    return source
