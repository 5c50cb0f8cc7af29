"""Finds the steps after the window whose inputs are larger than those of every recorded step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from memprof.recorder.calls.dispatch_modes import leaves_operators
from memprof.recorder.memory.inventory import tensors_in
from memprof.recorder.memory.tensor_memory import parameters_of, plain_tensors
from memprof.trace.files.spool import MISSED_STEP

#: Maximum number of steps recorded after the window.
_MOST_STEPS = 16
#: Once half of those are used, a step must be larger by this share: lengths may rise throughout.
_SHARE = 0.1
#: Steps recorded in a row for one whose size was known only after its training had begun.
_IN_A_ROW = 4


#: Usual argument types of models; they need no traversal.
_PLAIN = frozenset({torch.Tensor, type(None), bool, int, float, str})


class Move(Enum):
    """What the recording must do at a call of a model."""

    NONE = "none"
    BEGIN = "begin"  # record the step from here on
    END = "end"  # the recorded evaluation has no larger batch here: stop recording it


@dataclass(frozen=True)
class _Missed:
    """A step with larger inputs that was not recorded.

    Attributes:
        step: Its number.
        call: The kind of model and whether gradients were on; None if the total of the step's calls was larger.
        elements: Elements of the inputs.
    """

    step: int
    call: tuple[int, bool] | None
    elements: int


class LargerSteps:
    """Compares the inputs of models call by call, training and evaluation separately, and training steps as a whole.

    Sizes are numbers of elements; no tensor is kept.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, int] = {}
        self._alike: dict[tuple[type, tuple[tuple[int, ...], ...]], int] = {}
        self._recorded: dict[tuple[int, bool], int] = {}
        self._met: dict[tuple[type, bool], int] = {}
        self._recorded_total = 0
        self._largest: dict[tuple[int, bool], int] = {}
        self._total = 0
        self._trained = -1  # the model called first with gradients on in this step
        self._evaluated: tuple[int, bool] | None = None
        self._is_spent = False
        self._left = _MOST_STEPS
        self._in_a_row = 0
        self._missed: _Missed | None = None

    def kind(self, root: int, model: torch.nn.Module) -> int:
        """Returns the number of the first model like this one, which may be wrapped or made anew in every step.

        Args:
            root: The model's number; -1 for one that has none yet, which is only compared.
            model: The model.
        """
        if root in self._kinds:
            return self._kinds[root]
        alike = type(model), tuple(tuple(parameter.shape) for parameter in parameters_of(model))
        if root < 0:
            return self._alike.get(alike, -1)
        self._kinds[root] = self._alike.setdefault(alike, root)
        for trains in (False, True):
            self._recorded.setdefault((self._kinds[root], trains), self._met.pop((type(model), trains), 0))
        return self._kinds[root]

    def meet(self, model: torch.nn.Module, elements: int, *, trains: bool) -> None:
        """Notes a recorded call of a model that gets its number only now, as a loss made for each evaluation."""
        self._met[type(model), trains] = max(self._met.get((type(model), trains), 0), elements)

    def see(self, root: int, elements: int, *, trains: bool, is_recording: bool, kind: int | None = None) -> Move:
        """Notes a model call.

        A step can be recorded from its first call of a model with gradients on, or from an earlier call: until then
        it has computed nothing that backward needs.

        Args:
            root: The model's number.
            elements: Elements of its inputs.
            trains: Gradients are on.
            is_recording: The step is being recorded.
            kind: Number of the first model like it; the model's own where left out.
        """
        call = (root if kind is None else kind, trains)
        before = max(self._recorded.get(call, 0), self._largest.get(call, 0) if is_recording else 0)
        may_begin = not (is_recording or self._trained >= 0 or self._is_spent)
        self._largest[call] = max(self._largest.get(call, 0), elements)
        if trains:
            self._total += elements
            self._trained = root if self._trained < 0 else self._trained
            self._evaluated = None  # the recording belongs to this step, and continues to its end
        elif is_recording and call == self._evaluated and elements <= before:
            return Move.END
        if may_begin and self._is_worth(elements, before):
            self._evaluated = None if trains else call
            return Move.BEGIN
        return Move.NONE

    def begins_step(self, root: int) -> bool:
        """Whether a call begins another step in a job without an optimizer: a call of the model that was trained."""
        return root == self._trained

    def begin(self, root: int, *, trains: bool) -> None:
        """Notes that the step is recorded from the call that requested it."""
        self._left -= 1
        self._largest = {(root, trains): self._largest[root, trains]}

    @property
    def needs_step(self) -> bool:
        """Whether to record the step that begins now, because an earlier larger one was not recorded."""
        return self._in_a_row > 0 and self._left > 0

    def begin_step(self) -> None:
        """Notes that the step that begins now is recorded."""
        self._in_a_row -= 1
        self._left -= 1

    def end_evaluation(self) -> None:
        """Notes that the recorded part of the current step is over while the step continues."""
        self._merge()
        self._is_spent, self._evaluated = True, None

    def end_step(self, step: int, *, is_recorded: bool, is_over: bool) -> None:
        """Notes the end of a step.

        Args:
            step: Its number.
            is_recorded: It was recorded to its end.
            is_over: The window is over.
        """
        if is_recorded:
            self._merge()
            self._recorded_total = max(self._recorded_total, self._total)
            if self._missed is not None and not self._is_larger(self._missed):
                self._missed, self._in_a_row = None, 0
        else:
            for missed in self._larger_than_recorded(step):
                if self._missed is None or missed.elements >= self._missed.elements:
                    self._missed = missed
                is_training = missed.call is None or missed.call[1]
                if is_over and is_training and self._is_worth(missed.elements, self._known(missed)):
                    self._in_a_row = _IN_A_ROW
        self._largest.clear()
        self._total = 0
        self._trained, self._is_spent, self._evaluated = -1, False, None

    def sentence(self) -> str:
        """Returns a note on larger steps missing from the recording; "" if there are none."""
        missed = self._missed
        if missed is None or not self._is_larger(missed):
            return ""
        is_evaluation = missed.call is not None and not missed.call[1]
        known = self._known(missed)
        does = "called a model without gradients on" if is_evaluation else "had"
        what = f"larger inputs ({missed.elements:,} elements) than any recorded step ({known:,})"
        if not known:
            does, what = "called", f"a model{' without gradients' if is_evaluation else ''}, as no recorded step did"
        return f"{MISSED_STEP}step {missed.step} {does} {what}: record it with --skip {missed.step} --steps 1"

    def _is_worth(self, elements: int, known: int) -> bool:
        share = 0.0 if self._left > _MOST_STEPS // 2 else _SHARE
        return self._left > 0 and elements > known * (1 + share)

    def _is_larger(self, missed: _Missed) -> bool:
        return missed.elements > self._known(missed)

    def _known(self, missed: _Missed) -> int:
        return self._recorded_total if missed.call is None else self._recorded.get(missed.call, 0)

    def _larger_than_recorded(self, step: int) -> list[_Missed]:
        found = [
            _Missed(step, call, elements)
            for call, elements in self._largest.items()
            if elements > self._recorded.get(call, 0)
        ]
        if self._total > self._recorded_total:
            found.append(_Missed(step, None, self._total))
        return found

    def _merge(self) -> None:
        for call, elements in self._largest.items():
            self._recorded[call] = max(self._recorded.get(call, 0), elements)


def elements_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Returns the number of elements of all tensors passed to a model, without calling an operator.

    Tensors with dispatch rules would call one; if they hold plain tensors, those are counted instead.
    """
    elements = 0
    values = (*args, *kwargs.values()) if kwargs else args
    if all(type(value) in _PLAIN for value in values):
        return sum(value.numel() for value in values if type(value) is torch.Tensor)
    for tensor in tensors_in([args, kwargs]):
        for plain in plain_tensors(tensor):
            if leaves_operators(type(plain)):
                elements += int(plain.numel())
    return elements
