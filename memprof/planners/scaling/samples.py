"""Steps of one job at several sizes, and the size in which they differ: batch size or sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memprof.errors import InconclusiveError
from memprof.planners.scaling.match import group_alike
from memprof.trace.schema import Bools, Ints, read_shape
from memprof.trace.step import Step

#: Maximum offset of a shifted dimension when only two sizes are known: targets are one longer or shorter.
_SHIFT = 2

#: Number of storages made by forward that are used to find a size.
_FIRST = 12


@dataclass(frozen=True, eq=False)
class Sample:
    """A step at a known size.

    Attributes:
        step: The step.
        size: Its size: samples of the batch, or length of the sequences.
        run: Index of its recording.
    """

    step: Step
    size: int
    run: int = 0


@dataclass(frozen=True, eq=False)
class Samples:
    """Steps that differ in one size only.

    Attributes:
        samples: The steps, in ascending size.
        where: Where the size is, such as ``dimension 2 of an input``.
        shapes: That shape in the smallest and the largest step, as text.
        skipped: Steps that differ in more than the size.
    """

    samples: tuple[Sample, ...]
    where: str
    shapes: tuple[str, str]
    skipped: tuple[Step, ...]


@dataclass(frozen=True, eq=False)
class _Choice:
    """Steps whose inputs differ in one size: their indices, and its column of the table."""

    places: Ints
    column: int
    sizes: int


def find_samples(runs: Sequence[Sequence[Step]], *, advice: str) -> Samples:
    """Finds the size of their inputs in which the steps of one job differ.

    Of the steps that run the same operators on inputs with the same number of dimensions, those that differ in one size
    only are used: others, such as an evaluation or a smaller last batch, are left out. Dimensions that grow together (a
    target that is one longer, a flattened batch and length) are one size.

    Raises:
        InconclusiveError: They do not differ in size, or differ in more than one.
    """
    every = [(number, step) for number, run in enumerate(runs) for step in run]
    what, shapes = "an input", [_input_shapes(step) for _, step in every]
    found = _best_choices(every, shapes, has_runs=len(runs) > 1)
    if not found:
        # A batch that is a part of one large tensor has no storage of its own: use the storages forward makes of it.
        what, shapes = "what forward makes", [_forward_shapes(step) for _, step in every]
        found = _best_choices(every, shapes, has_runs=len(runs) > 1)
    if len(found) != 1:
        if found:
            advice = "Record steps that differ in one of them only."
            why = f"more than one size differs ({_described(found, shapes)})"
        else:
            inputs = ", ".join(dict.fromkeys(map(_text, _input_shapes(every[0][1])))) if every else ""
            why = f"no size differs{f', all ran on {inputs}' if inputs else ''}"
        raise InconclusiveError(f"cannot determine the varying size from the recorded steps' inputs: {why}. {advice}")
    chosen = found[0]
    order = sorted(chosen.places.tolist(), key=lambda place: _flat(shapes[place])[chosen.column])
    number, position = _place_of(shapes[order[0]], chosen.column)
    kept = set(order)
    return Samples(
        samples=tuple(Sample(every[place][1], _flat(shapes[place])[chosen.column], every[place][0]) for place in order),
        where=f"dimension {position + 1} of {what}",
        shapes=(_text(shapes[order[0]][number]), _text(shapes[order[-1]][number])),
        skipped=tuple(step for place, (_, step) in enumerate(every) if place not in kept),
    )


def _best_choices(
    every: list[tuple[int, Step]], shapes: list[list[tuple[int, ...]]], *, has_runs: bool
) -> list[_Choice]:
    """Returns the choices of most sizes, and among these of most steps; several on a tie."""
    by_kind: list[list[int]] = []
    for group in group_alike([step for _, step in every]):
        kinds: dict[tuple[int, ...], list[int]] = {}
        for place in group:
            kinds.setdefault(tuple(map(len, shapes[place])), []).append(place)
        by_kind += kinds.values()
    # By recording where there are several, else step by step.
    if all(len({every[place][0] if has_runs else place for place in group}) == 1 for group in by_kind):
        by_kind = [_common_inputs(shapes)]  # no two are alike: matching them reports where they diverge
    found = [choice for group in by_kind for choice in _choices(shapes, np.array(group))]
    most = max(((choice.sizes, len(choice.places)) for choice in found), default=(0, 0))
    return [choice for choice in found if (choice.sizes, len(choice.places)) == most]


def _described(found: Sequence[_Choice], shapes: list[list[tuple[int, ...]]]) -> str:
    """Describes the dimensions that differ: ``dimension 2 of 4x18 and dimension 2 of 4x9``."""
    words = []
    for choice in found[:3]:
        shape = shapes[int(choice.places[-1])]
        number, position = _place_of(shape, choice.column)
        words.append(f"dimension {position + 1} of {_text(shape[number])}")
    return " and ".join(dict.fromkeys(words))


def _common_inputs(shapes: list[list[tuple[int, ...]]]) -> list[int]:
    """Restricts the inputs of all steps to those with the same number of dimensions in each; returns their indices."""
    count = min(map(len, shapes), default=0)
    rows = [row for row in range(count) if len({len(each[row]) for each in shapes}) == 1]
    for each in shapes:
        each[:] = [each[row] for row in rows]
    return list(range(len(shapes)))


def _choices(shapes: list[list[tuple[int, ...]]], places: Ints) -> list[_Choice]:
    """Returns for each size that differs between some steps those of them that differ in nothing else."""
    table = np.array([_flat(shapes[place]) for place in places.tolist()], dtype=np.int64)
    if table.ndim < 2 or not table.shape[1]:
        return []
    differing = np.flatnonzero((table != table[0]).any(axis=0)).tolist()
    found: dict[bytes, _Choice] = {}
    for column in differing:
        kept = _alone(table, differing, column)
        sizes = len(set(table[kept, column].tolist()))
        if sizes < 2 or any(_is_multiple(table[kept, column], table[kept, other]) for other in differing):
            continue
        known = found.get(kept.tobytes())
        # A shifted dimension is the same size.
        if known is None or not _is_tied(table[kept, column], table[kept, known.column]):
            key = kept.tobytes() if known is None else kept.tobytes() + bytes(str(column), "ascii")
            found[key] = _Choice(places[kept], column, sizes)
    return list(found.values())


def _alone(table: Ints, differing: list[int], column: int) -> Ints:
    """Returns the largest set of rows in which a column is the only size that differs."""
    others = [
        other
        for other in differing
        if other != column
        and not _is_tied(table[:, other], table[:, column])
        and not _is_multiple(table[:, other], table[:, column])
    ]
    if not others:
        return np.arange(len(table))
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, key in enumerate(map(tuple, table[:, others].tolist())):
        groups.setdefault(key, []).append(row)
    return np.array(max(groups.values(), key=lambda rows: (len(set(table[rows, column].tolist())), len(rows))))


def _is_multiple(sizes: Ints, of: Ints) -> bool:
    times = int(sizes[0] // of[0]) if of[0] else 0
    return times > 1 and bool((sizes == times * of).all())


def _is_tied(sizes: Ints, to: Ints) -> bool:
    """Returns whether a dimension is a linear function of another one: always one longer, say."""
    distinct = len(set(to.tolist()))
    if distinct < 2 or len(set(sizes.tolist())) != distinct:
        return False
    if distinct == 2:
        shift = sizes - to
        return bool((shift == shift[0]).all()) and abs(int(shift[0])) <= _SHIFT
    far = int(np.argmax(np.abs(to - to[0])))
    rises: Bools = (sizes - sizes[0]) * (to[far] - to[0]) == (sizes[far] - sizes[0]) * (to - to[0])
    return bool(rises.all())


def _input_shapes(step: Step) -> list[tuple[int, ...]]:
    """Returns the shapes of the inputs that forward reads, in order of birth; of all inputs where it reads none."""
    storages, uses = step.storages, step.uses
    is_input = (storages.category == "input") & (storages.shape != "")
    is_read = np.zeros(len(storages), dtype=np.bool_)
    is_read[uses.storage_id[step.ops.phase[uses.op_id] == "forward"]] = True
    rows = np.flatnonzero(is_input & is_read)
    rows = rows if len(rows) else np.flatnonzero(is_input)
    return list(map(read_shape, storages.shape[rows].tolist()))


def _forward_shapes(step: Step) -> list[tuple[int, ...]]:
    """Returns the shapes of the first storages that forward makes."""
    storages = step.storages
    phase = np.append(step.ops.phase, "")[storages.created_op_id]  # the last entry is NONE
    rows = np.flatnonzero((phase == "forward") & (storages.shape != ""))[:_FIRST]
    return list(map(read_shape, storages.shape[rows].tolist()))


def _flat(shapes: list[tuple[int, ...]]) -> list[int]:
    return [size for shape in shapes for size in shape]


def _place_of(shapes: list[tuple[int, ...]], column: int) -> tuple[int, int]:
    """Returns the input, and the dimension in it, of a column of the table."""
    number = 0
    while column >= len(shapes[number]):
        column -= len(shapes[number])
        number += 1
    return number, column


def _text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
