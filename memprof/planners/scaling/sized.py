"""A step as a function of its size, from recordings at two sizes or more."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from memprof.errors import UsageError
from memprof.planners.scaling.curves import along, bent, growing
from memprof.planners.scaling.match import Match, match_steps
from memprof.replay.rounding import rounded
from memprof.trace.schema import Bools, Floats, Ints, Memory, Ops, Storages
from memprof.trace.step import Step


class SizedStep(Protocol):
    """A step at any size.

    Attributes:
        sizes: The sizes it was recorded at.
        source: How it is known at others (policies.base.SOURCES): modelled from several, or a rule from one.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes it was recorded at."""
        ...

    @property
    def source(self) -> str:
        """How it is known at other sizes: ``modelled`` or ``rule``."""
        ...

    def step_at(self, size: int) -> Step:
        """Returns the step as it would be recorded at a size."""
        ...


@dataclass(frozen=True, eq=False)
class MeasuredSizes:
    """A step at any size, from recordings at two or more: what is the same grows along the line between them.

    Where the shape of a storage tells its bytes, its dimensions grow, each along its own line: two dimensions that
    grow with the size make the bytes grow with its square. Elsewhere the bytes do; with three sizes or more they may
    be a parabola. An operator's temporaries, work and time grow with the size too, or with the bytes it touches where
    those grow with its square.

    What cannot be known from two sizes is where a kernel switches to another algorithm, and takes more or less for
    itself, at a size in between or beyond: a recording near the size asked for shows it. On a CPU with one thread,
    torch 2.13 runs 1x1 convolutions with oneDNN from a batch of 16 (``use_mkldnn`` in ATen's Convolution.cpp), which
    made the peak of a U-Net 3.8 % larger than predicted; oneDNN pads an LSTM's workspace to pages, which made 1.0 %.

    Attributes:
        sizes: The sizes recorded, rising.
        steps: The step at each.
        match: The rows that are the same.
    """

    sizes: tuple[int, ...]
    steps: tuple[Step, ...]
    match: Match

    @property
    def source(self) -> str:
        """How it is known at other sizes."""
        return "modelled"

    def step_at(self, size: int) -> Step:
        """Returns the step at a size; a size that was recorded gives the recorded bytes.

        Raises:
            UsageError: The size is not positive.
        """
        check_size(size)
        storages, touched = self._storages(size)
        return dataclasses.replace(
            self._base,
            duration_us=float(growing(*self._columns([[step.duration_us] for step in self.steps], size))[0]),
            ops=self._ops(size, touched),
            storages=storages,
            memory=Memory.empty(),
        )

    @property
    def _base(self) -> Step:
        """The step that gives the others their form: the largest."""
        return self.steps[-1]

    def _columns(self, values: list[list[float]], size: int) -> tuple[Floats, Floats, Floats]:
        table = np.array(values, dtype=np.float64)
        width = table.shape[1]
        return np.repeat(np.array(self.sizes, dtype=np.float64)[:, None], width, axis=1), table, np.full(width, size)

    def _storages(self, size: int) -> tuple[Storages, Floats]:
        """Returns the storages at a size, and what the bytes of each are there relative to the recorded sizes."""
        base = self._base.storages
        rows = self.match.storages
        recorded = np.stack(
            [step.storages.requested_bytes[row] for step, row in zip(self.steps, rows, strict=True)]
        ).astype(np.float64)
        found = np.ceil(bent(np.array(self.sizes, dtype=np.float64), recorded, float(size)) - 1e-6)
        texts = [step.storages.shape[row].astype(str) for step, row in zip(self.steps, rows, strict=True)]
        shapes, exact, is_known = _grown_shapes(texts, recorded, self.sizes, size)
        found = np.where(is_known, exact, found)
        requested = base.requested_bytes.copy()
        requested[rows[-1]] = np.maximum(found, 0).astype(np.int64)
        shape = base.shape.copy()
        shape[rows[-1][is_known]] = shapes[is_known]
        return resized(base, requested, shape), found

    def _ops(self, size: int, found: Floats) -> Ops:
        base = self._base.ops
        rows = self.match.ops
        points, at = self._points(size, found)
        changed = {}
        for name in ("workspace_bytes", "flops", "read_bytes", "written_bytes"):
            values = np.stack([getattr(step.ops, name)[row] for step, row in zip(self.steps, rows, strict=True)])
            there = along(points, values.astype(np.float64), at)
            # Temporaries are negative only where they were recorded so.
            there = np.where((values >= 0).all(axis=0), np.maximum(there, 0.0), there)
            column = getattr(base, name).copy()
            column[rows[-1]] = np.rint(there).astype(np.int64)
            changed[name] = column
        times = np.stack([step.ops.duration_us[row] for step, row in zip(self.steps, rows, strict=True)])
        duration = base.duration_us.copy()
        duration[rows[-1]] = growing(points, times, at)
        return base.replace(duration_us=duration, **changed)

    def _points(self, size: int, found: Floats) -> tuple[Floats, Floats]:
        """Returns what each operator grows with: the size, or the bytes it touches where those grow with its square."""
        rows, count = self.match.storages, self.match.ops.shape[1]
        position = np.full(len(self._base.ops), -1)
        position[self.match.ops[-1]] = np.arange(count)
        place = np.full(len(self._base.storages), -1)
        place[rows[-1]] = np.arange(rows.shape[1])
        uses = self._base.uses
        is_known = (position[uses.op_id] >= 0) & (place[uses.storage_id] >= 0)
        op, storage = position[uses.op_id[is_known]], place[uses.storage_id[is_known]]
        bytes_at = [step.storages.requested_bytes[row] for step, row in zip(self.steps, rows, strict=True)]
        touched = np.stack([np.bincount(op, each[storage], count) for each in (*bytes_at, found)])
        sizes = np.array([*self.sizes, size], dtype=np.float64)
        is_square = np.bincount(op, _is_square(self.steps, rows, self.sizes)[storage], count) > 0
        points: Floats = np.where(is_square, touched, sizes[:, None])
        return points[:-1], points[-1]


def scale_between(steps: Mapping[int, Step]) -> MeasuredSizes:
    """Learns from recordings of one job at several sizes how its step grows.

    Args:
        steps: A step by its size (samples of the batch, or length of the sequence), two sizes at least.

    Raises:
        UsageError: There are fewer than two sizes, or one that is not positive.
        InconclusiveError: The steps do not run the same operators, or do not hold the same tensors.
    """
    if len(steps) < 2:
        raise UsageError("Two recordings at different sizes are needed to tell how a step grows with its size.")
    sizes = tuple(sorted(steps))
    check_size(sizes[0])
    ordered = tuple(steps[size] for size in sizes)
    return MeasuredSizes(sizes, ordered, match_steps(ordered, [f"size {size}" for size in sizes]))


def check_size(size: int) -> None:
    """Refuses a size that is none.

    Raises:
        UsageError: It is not positive.
    """
    if size < 1:
        raise UsageError(f"A step of size {size} does not exist: sizes begin at 1.")


def resized(base: Storages, requested: Ints, shape: object) -> Storages:
    """Gives storages other sizes, and rounds as their allocators do.

    Args:
        base: The storages as recorded.
        requested: Bytes each is to have; where they are as recorded, so is what was allocated.
        shape: The shapes that go with them.
    """
    allocated = rounded(requested, base.device)
    # Memory that the allocator does not own stays so.
    keeps = (requested == base.requested_bytes) | (base.allocated_bytes == 0)
    return base.replace(
        requested_bytes=requested, allocated_bytes=np.where(keeps, base.allocated_bytes, allocated), shape=shape
    )


def _dimensions(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x")) if text else ()


def _grown_shapes(
    texts: list[np.ndarray], recorded: Floats, sizes: tuple[int, ...], size: int
) -> tuple[np.ndarray, Floats, Bools]:
    """Lets the dimensions of each shape grow along their own lines.

    Returns:
        The shapes at the size, their bytes, and which of them tell their storage's bytes at every recorded size.
    """
    width = recorded.shape[1]
    shapes, exact = np.full(width, "", dtype=np.object_), np.zeros(width)
    is_known = np.zeros(width, dtype=np.bool_)
    known: dict[tuple[str, ...], tuple[tuple[int, ...], list[float]] | None] = {}
    for column, key in enumerate(zip(*(each.tolist() for each in texts), strict=True)):
        if key not in known:
            known[key] = _grown([_dimensions(text) for text in key], sizes, size)
        grown = known[key]
        if grown is None:
            continue
        dimensions, counts = grown
        item = recorded[0, column] / counts[0]
        if item >= 1 and all(recorded[step, column] == count * item for step, count in enumerate(counts)):
            shapes[column] = "x".join(map(str, dimensions))
            exact[column] = float(np.prod(dimensions, dtype=np.float64)) * item
            is_known[column] = True
    return shapes, exact, is_known


def _grown(
    each: list[tuple[int, ...]], sizes: tuple[int, ...], size: int
) -> tuple[tuple[int, ...], list[float]] | None:
    """Returns the dimensions at a size, and the elements at every recorded one; None where the shapes do not tell."""
    ranks = set(map(len, each))
    if ranks == {0} or len(ranks) > 1:
        return None
    table = np.array(each, dtype=np.float64)
    counts: list[float] = table.prod(axis=1).tolist()
    if not all(counts):
        return None
    points = np.repeat(np.array(sizes, dtype=np.float64)[:, None], table.shape[1], axis=1)
    there = np.maximum(np.rint(along(points, table, np.full(table.shape[1], float(size)))), 1)
    return tuple(int(dimension) for dimension in there), counts


def _is_square(steps: tuple[Step, ...], rows: Ints, sizes: tuple[int, ...]) -> Bools:
    """Returns which matched storages grow with the square of the size: two of their dimensions grow."""
    texts = [step.storages.shape[row].tolist() for step, row in zip(steps, rows, strict=True)]
    known: dict[tuple[str, str], bool] = {}
    square = np.zeros(rows.shape[1], dtype=np.bool_)
    for column, pair in enumerate(zip(texts[0], texts[-1], strict=True)):
        if pair not in known:
            first, last = map(_dimensions, pair)
            grows = [a < b for a, b in itertools.zip_longest(first, last, fillvalue=0)]
            known[pair] = len(first) == len(last) and sum(grows) > 1
        square[column] = known[pair]
    return square
