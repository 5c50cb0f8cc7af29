"""Supplies placeholders when a job reads values that were not computed, and counts the reads by line."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from memprof.recorder.calls.read_values import LISTED
from memprof.recorder.calls.torch_state import packets
from memprof.virtual.values.known import has_shares, known
from memprof.virtual.values.loops import Rounds, is_end_of_loop, passing_condition
from memprof.virtual.values.recorded import RecordedValues

_aten = torch.ops.aten
#: Attribute of a fake tensor: its placeholder value.
_VALUE = "_memprof_value"
#: Attribute of a fake condition that hardly ever holds everywhere: a computed value is some number exactly.
_RARE = "_memprof_rare"
#: Attribute of a fake product of two vectors.
_PRODUCT = "_memprof_product"
_TRUE = packets("isfinite all _is_all_true")
_FALSE = packets("any _is_any_true isnan isinf")
_NOT = packets("logical_not bitwise_not")
#: Operators that return positions: 0 is in range unless the dimension is empty.
_PLACES = packets("argmax argmin argsort multinomial randint randperm random random_")
#: Operators whose results contain values of their inputs.
_SAME = packets("alias clone detach _to_copy index select slice squeeze unsqueeze view _unsafe_view expand unbind")
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent.parent))
_SCALER = str(Path("amp", "grad_scaler.py"))
_LBFGS = str(Path("optim", "lbfgs.py"))
#: Maximum number of lines named in a note; there may be hundreds.
_NAMED = 4
#: By how much the loss that LBFGS reads falls with each iteration: more than any tolerance.
_FALL = 2.0**-10


class Answers:
    """Harmless placeholders: losses of 1, no overflow, comparisons that are false except under all() and assert.

    That all elements of a computed tensor are some number (``(x == 0.0).all()``) is false, too, unless a loop goes on
    until then. Two comparisons with numbers are true, without which solvers get nowhere: that a number is at most 1, by
    which they accept a step whose error they have divided by its tolerance, and that a product of two vectors is above
    a positive number, by which quasi-Newton methods accept a step into their history.

    Attributes:
        recorded: Values of a recording.
        reads: How often values were read, or decided a size.
    """

    def __init__(self, recorded: RecordedValues | None = None, refuse: Callable[[str], Any] = str) -> None:
        """Starts with no reads counted.

        Args:
            recorded: The values of a recording of the job, which are replayed instead of placeholders.
            refuse: Ends the job with a message: one of its loops does not end.
        """
        self.recorded = recorded or RecordedValues()
        self._rounds = Rounds()
        self._refuse = refuse
        self._values: Counter[str] = Counter()
        self._bounds: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._evaluations = 0
        self.reads = 0

    def begin_step(self, step: int, *, is_recorded: bool) -> None:
        """Begins a step; as in `RecordedValues`."""
        self._rounds.begin_step()
        self.recorded.begin_step(step, is_recorded=is_recorded)

    def close(self) -> None:
        """Replays no more: the window is over."""
        self.recorded.close()

    def after(self, func: Any) -> None:
        """Notes that an operator has run."""
        self.recorded.previous = func
        self._rounds.operators += 1

    def mark(self, func: Any, args: Any, result: FakeTensor) -> None:
        """Marks the placeholder of an operator's result, if it differs from the default of its type."""
        packet = getattr(func, "overloadpacket", None)
        if packet in _SAME:
            known = getattr(args[0], _VALUE, None) if args else None
            if known is not None:
                setattr(result, _VALUE, known)
        elif packet in _TRUE:
            is_rare = hasattr(args[0], _RARE)
            setattr(result, _VALUE, 0 if is_rare else 1)
            if is_rare:
                setattr(result, _RARE, True)
        elif func is _aten.eq.Scalar and args[0].is_floating_point():
            setattr(result, _RARE, True)
        elif packet is _aten.dot:
            setattr(result, _PRODUCT, True)
        elif _accepts_step(func, args):
            setattr(result, _VALUE, 1)
        elif packet in _FALSE or packet in _PLACES:
            setattr(result, _VALUE, 0)
        elif packet in _NOT and result.dtype is torch.bool:
            setattr(result, _VALUE, 0 if getattr(args[0], _VALUE, 0) else 1)

    @staticmethod
    def mark_true(result: Any) -> Any:
        """Marks a condition as true, for one that torch computes from operators that do not determine it."""
        if isinstance(result, FakeTensor):
            setattr(result, _VALUE, 1)
        return result

    def value(self, tensor: torch.Tensor, func: Any = _aten._local_scalar_dense.default) -> Any:
        """Returns the value of a one-element tensor: one that is certain, was recorded, or else its placeholder."""
        self.reads += 1
        frame = sys._getframe(1)
        recorded, certain = self.recorded.value(func, frame), known(tensor)
        if recorded is not None and (certain is None or has_shares(tensor)):
            return _of_type(tensor.dtype, recorded)
        self._values[line_of(frame)] += 1
        if _is_scaler(frame):
            return 0.0  # no overflow: the optimizer steps
        if certain is not None:
            return certain.item()
        job = _job_frame(frame)
        self._bound(job)
        if hasattr(tensor, _RARE) and is_end_of_loop(job):
            return True
        if self._evaluations and tensor.dtype.is_floating_point and _is_own(frame, _LBFGS):
            return 1.0 - self._evaluations * _FALL
        asserted = passing_condition(job) if tensor.dtype is torch.bool else None
        return _of_type(tensor.dtype, getattr(tensor, _VALUE, None)) if asserted is None else asserted

    def values(self, tensor: torch.Tensor, method: str = "numpy") -> torch.Tensor:
        """Returns a real tensor with a tensor's values, as far as they are certain or recorded, or its placeholder."""
        self.reads += 1
        recorded, certain = self.recorded.value(LISTED[method], sys._getframe(2)), known(tensor)
        if recorded is not None and (certain is None or has_shares(tensor)):
            with torch._C._DisableTorchDispatch():
                listed = torch.tensor(recorded, dtype=tensor.dtype, device="cpu")
            if listed.shape == tensor.shape:
                return listed
        self._values[line_of(sys._getframe(1))] += 1
        if certain is not None:
            return certain.clone()
        self._bound(_job_frame(sys._getframe(1)))
        value = _of_type(tensor.dtype, getattr(tensor, _VALUE, None))
        with torch._C._DisableTorchDispatch():
            return torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")

    @contextmanager
    def falling(self, evaluate: Callable[[], Any], most: int) -> Iterator[Callable[[], Any]]:
        """Lets the loss that LBFGS reads in an update fall with each evaluation, so that it goes on.

        Args:
            evaluate: Returns the loss.
            most: Evaluations after which it no longer falls, which ends the update: its history is full.

        Yields:
            The function to call for `evaluate`.
        """

        def counted() -> Any:
            self._evaluations = min(self._evaluations + 1, most)
            return evaluate()

        before, self._evaluations = self._evaluations, 0
        try:
            yield counted
        finally:
            self._evaluations = before

    def equality(self, func: Any) -> bool:
        """Returns whether two tensors are equal: as recorded, or else true, as scripts that check require."""
        frame = sys._getframe(1)
        recorded = self.recorded.value(func, frame)
        if recorded is not None:
            return bool(recorded)
        self._values[line_of(frame)] += 1
        return True

    def _bound(self, job: FrameType | None) -> None:
        """Ends the dry run if a loop would go on and on."""
        endless = self._rounds.note(job)
        if endless:
            self._refuse(endless)

    def count_bound(self, func: Any) -> None:
        """Counts an operator whose result size was taken as its upper bound."""
        self._bounds[f"{func} at {line_of(sys._getframe(1))}"] += 1

    def count_left_out(self, what: str) -> None:
        """Counts an action that a dry run omits, such as writing a checkpoint."""
        self._left_out[what] += 1

    def notes(self) -> list[str]:
        """Returns notes on the placeholders for the reader of the trace."""
        notes = []
        if self._values:
            notes.append(
                f"values that were not computed were read {_times(self._values)}, at {_places(self._values)}: "
                "where control flow depends on them, a real run may differ"
            )
        if self._bounds:
            notes.append(
                f"sizes that depend on values are upper bounds, {_times(self._bounds)}: {_places(self._bounds)}"
            )
        notes += self.recorded.notes()
        notes += [f"{what} ({_times(Counter({what: count}))})" for what, count in self._left_out.items()]
        return notes


def _accepts_step(func: Any, args: Any) -> bool:
    """Whether a comparison is one by which solvers accept a step: of its error, or the product that curvature has."""
    if func is _aten.le.Scalar:
        return bool(args[1] == 1) and args[0].dim() == 0 and args[0].is_floating_point()
    return func is _aten.gt.Scalar and args[1] > 0 and hasattr(args[0], _PRODUCT)


def carry_marks(tensor: torch.Tensor) -> tuple[tuple[str, Any], ...]:
    """Returns the attributes of a fake tensor that decide its placeholder."""
    return tuple((name, getattr(tensor, name)) for name in (_VALUE, _RARE, _PRODUCT) if hasattr(tensor, name))


def _of_type(dtype: torch.dtype, known: Any) -> Any:
    if dtype is torch.bool:
        return bool(known)
    value = 1 if known is None else known
    if dtype.is_complex:
        return complex(value)
    return float(value) if dtype.is_floating_point else value


def line_of(frame: FrameType | None) -> str:
    """Returns the innermost line outside torch and memprof."""
    found = _job_frame(frame)
    return "torch" if found is None else f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"


def _job_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the innermost frame outside torch and memprof."""
    while frame is not None and frame.f_code.co_filename.startswith((*_OWN, "<")):
        frame = frame.f_back
    return frame


def _is_scaler(frame: FrameType | None) -> bool:
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code.co_filename.endswith(_SCALER):
            return True
        frame = frame.f_back
    return False


def _is_own(frame: FrameType, file: str) -> bool:
    """Whether a value is read by a file of torch's, not by the job's code that it calls."""
    at: FrameType | None = frame
    while at is not None and at.f_code.co_filename.startswith(_OWN):
        if at.f_code.co_filename.endswith(file):
            return True
        at = at.f_back
    return False


def _times(counts: Counter[str]) -> str:
    total = counts.total()
    return "once" if total == 1 else f"{total:,} times"


def _places(counts: Counter[str]) -> str:
    named = ", ".join(place for place, _ in counts.most_common(_NAMED))
    more = len(counts) - _NAMED
    return f"{named} and {more} more lines" if more > 1 else f"{named} and one more line" if more == 1 else named
