"""Replays the values that a recording of the job has, by line and in order."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from memprof.recorder.calls.read_values import SCALARS, deciding, is_read, reading_line
from memprof.trace.files.spool import READ_VALUES

#: Attribute of a saved state of the random generator: how far the values were replayed by then.
_PLACES = "_memprof_places"
#: Operators whose result has no more rows where they run on a part of the tensor: distinct values, and classes.
_DISTINCT = ("aten._unique", "aten.unique", "aten.bincount", "torchvision.nms")
#: By how many values a line may have read more in the recording than in the dry run, before one of another operator.
_AHEAD = 8
#: Returns the least and the largest value, of which torch reads both to check classes, and the largest alone.
_BOUNDS, _BOUND = "aten.aminmax.default", "aten.max.default"
_Row = tuple[int, str, str, str, int, str]
#: The operator before the one that reads, the elements that the value depends on, and the value.
_Read = tuple[str, int, Any]


class RecordedValues:
    """The values of each step, by the lines that read them. Where a line reads more of them, they start over.

    torch reads a value more of a real tensor here and there, to check it: those of another operator are left out.

    That is the order in which an unchanged job reads them, and a plan that runs the step in parts, each of which reads
    them again. A checkpointed region that runs again reads the values that it read first: torch sets the generator back
    for it, and the values with it.

    Attributes:
        previous: The operator that ran last.
    """

    def __init__(self, rows: Iterable[_Row] = ()) -> None:
        """Sorts the rows.

        Args:
            rows: The table ``read_values``.
        """
        self._steps: dict[int, dict[tuple[str, str], list[_Read]]] = {}
        for step, line, name, previous, elements, value in rows:
            values = self._steps.setdefault(step, {}).setdefault((line, name), [])
            # The second value of both bounds; where torch looks for one of them alone, it has an operator of its own.
            is_second = previous == name and values and values[-1][0] == _BOUNDS
            values.append((_BOUND if is_second else previous, elements, json.loads(value)))
        self._values: dict[tuple[str, str], list[_Read]] = {}
        self.previous: Any = None
        self._places: dict[tuple[str, str], int] = {}
        self._count = self._scaled = 0
        if self._steps:
            # Set back with the generator, as `torch.utils.checkpoint` does before a region runs again.
            functions: Any = torch
            functions.get_rng_state = self._followed(torch.get_rng_state, self._save)
            functions.set_rng_state = self._followed(torch.set_rng_state, self._restore)

    @staticmethod
    def read(spool: Path) -> RecordedValues:
        """Reads those that the parent has put into a spool folder; none where it has not."""
        path = spool / READ_VALUES
        return RecordedValues(json.loads(path.read_bytes()) if path.is_file() else ())

    @property
    def are_there(self) -> bool:
        """Whether there is a recording."""
        return bool(self._steps)

    def begin_step(self, step: int, *, is_recorded: bool) -> None:
        """Takes the values of a step: its own, or else those of the last recorded one before it, or the first.

        Args:
            step: Its number.
            is_recorded: Whether the dry run records it; values are replayed in any case.
        """
        before = [number for number in self._steps if number <= step]
        self._values = self._steps.get(max(before) if before else min(self._steps, default=0), {})
        self._places = {}

    def has(self, func: Any, args: Any) -> bool:
        """Whether the rows of an operator's result may have been recorded."""
        return bool(self._values) and is_read(func) and deciding(func, args) is not None

    def close(self) -> None:
        """Replays no more: the window is over."""
        self._values = {}

    def value(self, func: Any, frame: FrameType | None) -> Any:
        """Returns the value that a line reads next; None where none was recorded.

        Args:
            func: The operator, or the name of a method.
            frame: The frame that reads it, or frames of the dry run's mode that it called.
        """
        found = self._next(func, frame)
        return None if found is None else found[2]

    def skip(self, func: Any, args: Any, frame: FrameType | None) -> None:
        """Leaves out a value that the dry run has itself, if an operator reads one."""
        if self._values and (func in SCALARS or self.has(func, args)):
            self._next(func, frame)

    def rows(self, func: Any, tensor: torch.Tensor | None, frame: FrameType | None) -> int | None:
        """Returns the rows of an operator's result; None where they were not recorded.

        Args:
            func: The operator.
            tensor: The tensor on whose values they depend. Of a part of what was recorded, it has its share.
            frame: The frame that calls the operator, or frames of the dry run's mode that it called.
        """
        found = None if tensor is None else self._next(func, frame)
        if found is None or tensor is None:
            return None
        _, elements, rows = found
        if elements in (0, tensor.numel()):
            return int(rows)
        self._scaled += 1
        is_distinct = str(func).startswith(_DISTINCT)
        return int(min(rows, tensor.numel())) if is_distinct else math.ceil(rows * tensor.numel() / elements)

    def notes(self) -> list[str]:
        """Returns notes on what was replayed."""
        if not self._count:
            return []
        scaled = f"; {self._scaled:,} sizes were scaled to smaller or larger inputs" if self._scaled else ""
        return [f"{self._count:,} values that a recording of the job has were replayed{scaled}"]

    def _next(self, func: Any, frame: FrameType | None) -> _Read | None:
        key = (reading_line(frame), str(func)) if self._values else ("", "")
        values = self._values.get(key)
        if values is None:
            return None
        first, previous = self._places.get(key, 0), str(self.previous)
        ahead = range(first, first + min(_AHEAD, len(values)))
        place = next((place for place in ahead if values[place % len(values)][0] == previous), first)
        self._places[key] = place + 1
        self._count += 1
        return values[place % len(values)]

    @staticmethod
    def _followed(original: Callable[..., Any], then: Callable[[Any], None]) -> Callable[..., Any]:
        @wraps(original)
        def followed(*state: Any) -> Any:
            result = original(*state)
            then(result if result is not None else state[0])
            return result

        return followed

    def _save(self, state: Any) -> None:
        setattr(state, _PLACES, dict(self._places))

    def _restore(self, state: Any) -> None:
        self._places = dict(getattr(state, _PLACES, self._places))
