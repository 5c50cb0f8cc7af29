"""Finds the lines whose tensors stay: where those of two steps are made, and which are alive long after.

What is kept less often than in every step, such as once an epoch, is seldom made in these two: until its line is found,
tensors of its size are followed in the steps after them, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memprof.recorder.calls.dispatch_modes import tensors_in
from memprof.recorder.calls.operator_rows import FAILED
from memprof.recorder.calls.operator_traits import OperatorTraits
from memprof.recorder.calls.stacks import runs_code_of_job
from memprof.recorder.calls.tracebacks import clean_uncaught
from memprof.recorder.faults import explain_fault, raise_if_of_job
from memprof.recorder.log import RawLog
from memprof.recorder.memory.kept import Size, Survivor
from memprof.recorder.memory.tensor_memory import owned_span
from memprof.recorder.operators import OperatorMode
from memprof.trace.files.spool import FLAG_MUTATES, FLAG_VIEW
from memprof.trace.operator_facts import LIFT

_current_node = torch._C._current_autograd_node
_sequence_number = torch._C._autograd._get_sequence_nr

#: Steps whose tensors are followed: a line that leaks makes some in each.
_STEPS = 2
#: Tensors are kept if they are alive this many steps after those.
_LATER = 2
#: Storages that are followed at most, and lines that are written, those of most bytes first.
_MOST_STORAGES, _MOST_LINES = 50_000, 100
#: Share of the thread's processor time that this may take, and the time that every run gets for it.
_SHARE, _ALLOWANCE_NS = 0.0025, 100_000_000
#: What following one operator takes, the dispatch mode included.
_OPERATOR_NS = 10_000

#: Code and position of each frame, innermost first.
_Stack = tuple[tuple[CodeType, int], ...]
#: Stack, number of the operator's name, element type and device.
_Line = tuple[_Stack, int, torch.dtype, torch.device]


class _Made(NamedTuple):
    """A storage made in a step that is followed."""

    alive: StorageWeakRef
    step: int
    module: int
    address: int
    size_bytes: int
    shape: tuple[int, ...]
    node: int


class Origins:
    """Follows the operators of a few steps, and returns later which of the storages that they made are still alive.

    References to the storages are weak: nothing is kept alive.
    """

    def __init__(self, log: RawLog, module: Callable[[], int]) -> None:
        """Follows nothing yet.

        Args:
            log: Destination of names and notes.
            module: Returns the number of the module that runs, -1 outside any.
        """
        self._log = log
        self._module = module
        self._mode = OperatorMode(log, self, self._give_up, clean_uncaught, _nothing)
        self.span: Callable[[torch.Tensor], tuple[int, int]] = owned_span
        self._lift = log.intern("names", LIFT)
        self._began_ns = time.thread_time_ns()
        self._spent_ns = 0
        self._step = self._first_step = 0
        self._wanted: frozenset[Size] = frozenset()
        self._found: set[Size] = set()
        self._allowed_ns = 0.0
        self._sequence = 0  # of the next autograd node, at the last operator
        self._has_failed = False
        self._made: dict[int, tuple[_Line, _Made]] = {}
        self._stacks: dict[_Stack, _Stack] = {}
        self._of_node: dict[int, _Stack] = {}

    def begin(self, step: int, wanted: frozenset[Size]) -> None:
        """Follows the next steps, unless that would take too much of the run.

        Args:
            step: The first of them.
            wanted: Sizes of the tensors of which there are more than before.
        """
        self._allowed_ns = _ALLOWANCE_NS + _SHARE * (time.thread_time_ns() - self._began_ns)
        if self._has_failed or self._mode.is_on or self._spent_ns > self._allowed_ns:
            return
        self._forget()
        self._step = self._first_step = step
        self._wanted = wanted - self._found
        self._sequence = _sequence_number()
        self._mode.slide_in()

    def end_step(self) -> None:
        """Ends a step, and follows no more operators after the last, or once that takes too much of the run."""
        self._of_node.clear()
        if not self._mode.is_on:
            if self._mode.is_here():  # it was stopped within an operator, or by another thread
                self._mode.slide_out()
            return
        self._step += 1
        if self._is_extended and (not self._wanted or self._spent_ns > self._allowed_ns):
            self._mode.slide_out()

    def stop(self) -> None:
        """Follows no more operators: the job's own profiler begins, the recording ends, or this is a forked child."""
        if self._mode.is_here():
            self._mode.slide_out()
        self._mode.is_on = False
        self._forget()

    @property
    def _is_extended(self) -> bool:
        """Whether only tensors of wanted sizes are followed: the first steps are over."""
        return self._step >= self._first_step + _STEPS

    def take_survivors(self, step: int) -> list[Survivor]:
        """Returns the storages of the steps followed last that are still alive, and forgets them.

        Args:
            step: The step that has just ended.
        """
        if step < self._first_step + _STEPS - 1 + _LATER:
            return []
        if self._mode.is_here():
            self._mode.slide_out()
        lines: dict[_Line, dict[int, list[_Made]]] = {}
        for line, made in self._made.values():
            if made.step <= step - _LATER and not made.alive.expired():  # type: ignore[no-untyped-call]
                lines.setdefault(line, {}).setdefault(made.step, []).append(made)
        kept = []
        for line, steps in lines.items():
            sizes = {(made.size_bytes, line[2]) for some in steps.values() for made in some}
            if all(self._first_step + later in steps for later in range(_STEPS)):
                kept.append((line, {number: steps[number] for number in sorted(steps)[:_STEPS]}))
                self._found |= sizes
            elif sizes & self._wanted:
                kept.append((line, steps))
                self._found |= sizes & self._wanted
        kept.sort(key=lambda one: -sum(made.size_bytes for some in one[1].values() for made in some))
        found = [_survivor(line, some) for line, steps in kept[:_MOST_LINES] for some in steps.values()]
        self._forget()
        return found

    def begin_epoch(
        self,
        on_output: Callable[[torch.Tensor, int], None] | None,
        on_collective: Callable[[torch.Tensor], None] | None,
        *,
        has_streams: bool,
    ) -> None:
        """Needs no preparation."""

    def add(
        self,
        operator: OperatorTraits,
        args: Any,
        kwargs: Any,
        result: Any,
        start_ns: int,
        end_ns: int,
        frame: FrameType | None,
    ) -> None:
        """Notes which storages an operator has made; the arguments are those of `OperatorRows.add`."""
        self._spent_ns += _OPERATOR_NS
        if self._is_extended and self._spent_ns > self._allowed_ns:
            self._mode.is_on = False  # the end of the step removes it
        if result is FAILED or operator.flags & FLAG_MUTATES or len(self._made) >= _MOST_STORAGES:
            return
        if operator.flags & FLAG_VIEW and operator.name != self._lift:
            return
        outputs = (result,) if isinstance(result, torch.Tensor) else tensors_in(result)
        is_extended = self._is_extended
        stack = () if is_extended else self._stack_of(frame)
        before, self._sequence = self._sequence, _sequence_number()
        node = self._sequence - 1 if self._sequence > before else -1
        for tensor in outputs:
            address, size = owned_span(tensor)
            if not address or tensor.is_nested or (is_extended and (size, tensor.dtype) not in self._wanted):
                continue
            stack = stack or self._stack_of(frame)
            alive = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            line = (stack, operator.name, tensor.dtype, tensor.device)
            made = _Made(alive, self._step, self._module(), address, size, tuple(map(int, tensor.shape)), node)
            # A weak reference keeps a storage's own address from being used again.
            self._made.setdefault(alive.cdata, (line, made))

    def _stack_of(self, frame: FrameType | None) -> _Stack:
        """Returns the stack of an operator: of a backward node's own ones, that of the forward operator."""
        node = _current_node()
        if (
            node is not None
            and not runs_code_of_job(frame)
            and (forward := self._of_node.get(node._sequence_nr())) is not None
        ):
            return forward
        frames = []
        while frame is not None:
            frames.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        key = tuple(frames)
        stack = self._stacks.setdefault(key, key)
        if node is None:
            # Operators without a node of their own follow the one whose node this is.
            self._of_node.setdefault(_sequence_number() - 1, stack)
        return stack

    def _forget(self) -> None:
        self._made.clear()
        self._stacks.clear()
        self._of_node.clear()

    def _give_up(self, error: Exception) -> None:
        raise_if_of_job(error)
        self._has_failed = True
        self._log.record("notes", f"lines of tensors that stay are missing: {explain_fault(error)}")
        self.stop()


def _survivor(line: _Line, made: list[_Made]) -> Survivor:
    stack, op, dtype, device = line
    largest = max(made, key=lambda one: one.size_bytes)
    return Survivor(
        made_step=largest.step,
        op=op,
        module=largest.module,
        frames="\n".join(f"{code.co_filename}:{_line_number(code, at)}:{code.co_name}" for code, at in stack),
        shape="x".join(map(str, largest.shape)),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        spans=[(one.address, one.size_bytes) for one in made],
        nodes=frozenset(one.node for one in made if one.node >= 0),
    )


def _line_number(code: CodeType, position: int) -> int:
    """Returns the line of an instruction."""
    lines = (line for start, end, line in code.co_lines() if start <= position < end)
    return next(lines, None) or code.co_firstlineno


def _nothing(*_given: object) -> None:
    """Running out of memory needs nothing here: the observation records how the job ends."""
