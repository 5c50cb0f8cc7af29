"""Logs the values that a job reads from tensors, and sizes that depend on values: dry runs of the job replay them."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from memprof.recorder.calls.torch_state import overloads
from memprof.recorder.calls.tracebacks import OWN_CODE, clean_uncaught
from memprof.recorder.compiled.uncompiled import skip_compiling
from memprof.recorder.log import RawLog
from memprof.trace.operator_facts import READS_VALUE

_aten = torch.ops.aten
#: Kept of a recording, as characters; what a job reads after that is not.
_MOST_CHARACTERS = 2**20
#: Least characters that a value counts as, with its line.
_LEAST_CHARACTERS = 16
#: Lists with more elements are data, on which no control flow depends.
_MOST_ELEMENTS = 1024
_OWN = str(Path(__file__).parents[2])
_TORCH = Path(torch.__file__).parent
_NOT_OF_JOB = (str(_TORCH), _OWN, "<")
#: Code between an operator's caller and a mode that it is passed to.
_BETWEEN = (*OWN_CODE, "<", str(_TORCH / "_compile.py"), str(_TORCH / "_dynamo"), str(_TORCH / "_ops.py"))
#: Calls `Tensor.numpy`, and is replaced in dry runs.
_ARRAY = "__array__"
#: Prints a tensor value by value; nothing depends on these.
_PRINTING = "_tensor_str.py"
#: Types of masks.
MASKS = (torch.bool, torch.uint8)
#: Operators that return a value.
SCALARS = overloads(READS_VALUE)
#: Methods of a tensor that read its values without an operator, by the names they are logged with.
LISTED = {"tolist": "Tensor.tolist", "numpy": "Tensor.numpy"}


def kept_elements(tensor: torch.Tensor, indices: Any) -> int:
    """Returns the elements of a tensor for one value of its indices.

    Args:
        tensor: The tensor.
        indices: Indices and masks of its first dimensions; None where one has none.
    """
    place, kept = 0, 1
    for index in indices:
        if index is None:
            kept *= tensor.shape[place]
        place += index.dim() if index is not None and index.dtype in MASKS else 1
    return kept * tensor.shape[place:].numel()


def _rows(args: Any, result: Any) -> int:
    return int((result[0] if isinstance(result, (tuple, list)) else result).shape[0])


def _rows_along(args: Any, result: Any) -> int:
    return int(result[0].shape[args[1]])


def _consecutive(args: Any, result: Any) -> int:
    return int(result[0].shape[args[3] if len(args) > 3 and args[3] is not None else 0])


def _selected(args: Any, result: Any) -> int:
    return int(result.numel() // max(kept_elements(*args[:2]), 1))


#: Operators whose result has a size that depends on values, by name (some are of other libraries).
SIZED: dict[str, Callable[[Any, Any], int]] = {
    **dict.fromkeys(("aten::nonzero", "aten::masked_select", "aten::bincount", "aten::_unique2"), _rows),
    **dict.fromkeys(("aten::repeat_interleave.Tensor", "torchvision::nms"), _rows),
    "aten::unique_dim": _rows_along,
    "aten::unique_consecutive": _consecutive,
    "aten::index.Tensor": _selected,
}


def is_read(func: Any) -> bool:
    """Whether an operator returns a value of a tensor, or a result whose size depends on values."""
    return func in SCALARS or (hasattr(func, "_schema") and func.name() in SIZED)


def deciding(func: Any, args: Any) -> torch.Tensor | None:
    """Returns the tensor of whose values an operator's result has as many rows; None where its size does not depend."""
    if func is _aten.index.Tensor:
        return next((index for index in args[1] if index is not None and index.dtype in MASKS), None)
    tensor: torch.Tensor = args[1] if func is _aten.masked_select.default else args[0]
    return tensor


def reading_line(frame: FrameType | None) -> str:
    """Returns the lines that read a value: the innermost one, and the job's where that is torch's.

    Args:
        frame: The frame that calls an operator, or frames of memprof's modes that it called.

    Returns:
        ``file:line:function``, joined by " < "; "" for a policy's own reads and for what is printed.
    """
    while frame is not None and (frame.f_code.co_filename.startswith(_BETWEEN) or frame.f_code.co_name == _ARRAY):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_OWN) or frame.f_code.co_filename.endswith(_PRINTING):
        return ""
    job: FrameType | None = frame
    while job is not None and job.f_code.co_filename.startswith(_NOT_OF_JOB):
        job = job.f_back
    return " < ".join(_named(one) for one in ((frame,) if job is frame or job is None else (frame, job)))


def _named(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}:{frame.f_code.co_name}"


class ReadLog:
    """Logs what the observed thread reads, as it is returned to the job: no tensor is read for it."""

    def __init__(self, log: RawLog) -> None:
        """Starts before the first step.

        Args:
            log: Destination of the rows.
        """
        self._log = log
        self._step = -1
        self._is_on = False
        self._left = _MOST_CHARACTERS
        self._thread = threading.get_ident()
        for method in LISTED:
            if not _is_own(method):
                setattr(torch.Tensor, method, self._followed(getattr(torch.Tensor, method), method))

    def begin_step(self, step: int, *, is_recorded: bool) -> None:
        """Notes the number of the step that begins, and whether what is read in it is logged."""
        self._step, self._is_on = step, is_recorded

    def add(self, func: Any, name: int, previous: int, args: Any, result: Any, frame: FrameType | None) -> None:
        """Logs an operator that has run, if it `is_read`."""
        if func in SCALARS:
            self._note(name, previous, 1, result, frame)
            return
        tensor = deciding(func, args)
        if tensor is not None:
            self._note(name, previous, tensor.numel(), SIZED[func.name()](args, result), frame)

    def close(self) -> None:
        """Removes the functions of torch's that were wrapped."""
        self._is_on = False
        for method in filter(_is_own, LISTED):
            delattr(torch.Tensor, method)

    def notes(self) -> list[str]:
        """Returns a note on values that were not kept."""
        if self._left >= 0:
            return []
        return ["the job reads many values: its dry runs replay those of the first recorded steps"]

    def _followed(self, original: Callable[..., Any], method: str) -> Callable[..., Any]:
        @wraps(original)
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            try:
                result = original(tensor, *args, **kwargs)
            except BaseException:
                clean_uncaught()
                raise
            if self._is_on and threading.get_ident() == self._thread:
                with suppress(Exception):  # nothing in here may reach the job
                    elements = tensor.numel()
                    if elements <= _MOST_ELEMENTS:
                        values = result if isinstance(result, list) else result.tolist()
                        name = self._log.intern("names", LISTED[method])
                        self._note(name, -1, elements, values, sys._getframe(1))
            return result

        skip_compiling(read)
        read.is_memprof = True  # type: ignore[attr-defined]
        return read

    def _note(self, name: int, previous: int, elements: int, value: Any, frame: FrameType | None) -> None:
        line = "" if self._left < 0 or isinstance(value, complex) else reading_line(frame)
        if not line:
            return
        text = json.dumps(value)
        self._left -= max(len(text), _LEAST_CHARACTERS)
        if self._left < 0:
            self._log.record("reads_end", self._step)
            return
        line_number, value_number = self._log.intern("read_lines", line), self._log.intern("read_values", text)
        self._log.reads.extend((self._step, line_number, name, previous, elements, value_number))


def _is_own(method: str) -> bool:
    return getattr(torch.Tensor.__dict__.get(method), "is_memprof", False)
