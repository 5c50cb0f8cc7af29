"""The dispatch mode that runs the operators of the recorded thread, and has each of them logged."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from memprof.recorder.calls import dispatch_modes
from memprof.recorder.calls.dispatch_modes import SlidingMode, leaves_operators, with_tensors
from memprof.recorder.calls.operator_rows import FAILED, OperatorObserver
from memprof.recorder.calls.operator_traits import OperatorTraits
from memprof.recorder.calls.read_values import ReadLog
from memprof.recorder.calls.torch_state import untraced
from memprof.recorder.clock import clock_ns
from memprof.recorder.log import RawLog
from memprof.recorder.memory.out_of_memory import is_out_of_memory

_get_mode = torch._C._get_dispatch_mode
_tracing_state = torch._C._get_tracing_state
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_DEVICE = torch.ops.prim.device.default
_no_functions: Any = torch._C.DisableTorchFunction
_Tensor = torch.Tensor
_cuda: Any = torch.cuda  # not annotated in torch


class OperatorMode(SlidingMode):
    """Logs operators while it is on the dispatch stack.

    It sits at the bottom of the stack, below any mode of the user's, so that theirs are entered and left as if it
    were absent. It declines operators on tensor subclasses and sees the plain operators they decompose into.

    Attributes:
        rows: Logs them.
        is_on: Whether it logs.
        fake_type: Type of the fake tensors of a dry run; None in a real run.
        reads: Logs the values that operators return; None in a dry run, which has none.
        not_followed: Higher-order operators logged as one operator each: the operators inside were not recorded.
    """

    def __init__(
        self,
        log: RawLog,
        rows: OperatorObserver,
        on_fault: Callable[[Exception], None],
        on_operator_error: Callable[[], None],
        on_out_of_memory: Callable[[BaseException], None],
    ) -> None:
        """Stores the recorder's shared components.

        Args:
            log: Destination of the rows.
            rows: Logs operators after they ran.
            on_fault: Called when logging itself failed; the job continues.
            on_operator_error: Called when an operator of the job raised, before the error propagates.
            on_out_of_memory: Called with the error when the operator logged last ran out of memory.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch's base is not annotated
        self._log = log
        self.rows = rows
        self._add = rows.add
        self._lock = threading.RLock()
        self._on_fault = on_fault
        self._on_operator_error = on_operator_error
        self._on_out_of_memory = on_out_of_memory
        self._operators: dict[Any, OperatorTraits] = {}
        self.is_on = False
        self.fake_type = None
        self.reads: ReadLog | None = None
        self._previous = -1
        self.not_followed: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator and logs it."""
        if self.fake_type is None:
            if _get_mode(_FAKE) is not None:
                # DTensor computes shapes on meta tensors. Torch's own modes come after this one, and are
                # skipped if it declines.
                return func(*args, **kwargs) if kwargs else func(*args)
        elif func is _DEVICE:
            return func(*args)  # a query, which a meta or fake tensor forwards to Python
        for kind in types:
            if kind is not _Tensor and kind is not self.fake_type and not leaves_operators(kind):
                return NotImplemented
        operator = self._operators.get(func)
        if operator is None:
            operator = self._operators[func] = OperatorTraits(func, self._log.intern("names", str(func)))
        if operator.is_higher_order:
            return self._run_higher_order(operator, func, args, kwargs or {})
        start_ns = clock_ns()
        try:
            result = operator.call(*args, **kwargs) if kwargs else operator.call(*args)
        except BaseException as error:
            if isinstance(error, RuntimeError) and (given := with_tensors(func, args)) is not None:
                return self.__torch_dispatch__(func, types, given, kwargs)
            self._on_operator_error()
            if self.is_on and is_out_of_memory(error):
                self._note_failed(operator, args, kwargs, start_ns, sys._getframe().f_back, error)
            raise
        end_ns = clock_ns()
        if self.is_on:
            try:
                # Subclasses and modes of the user's must not see the recorder's calls; device threads take turns.
                frame = sys._getframe().f_back
                with self._lock, _no_functions():
                    if _tracing_state() is None:
                        self._add(operator, args, kwargs, result, start_ns, end_ns, frame)
                        if operator.is_read and self.reads is not None:
                            self.reads.add(func, operator.name, self._previous, args, result, frame)
                        self._previous = operator.name
                    else:
                        with untraced():
                            self._add(operator, args, kwargs, result, start_ns, end_ns, frame)
            except Exception as error:  # noqa: BLE001 - whatever fails in here must not reach the job
                self._on_fault(error)
        return result

    def run_generated(
        self, operator: OperatorTraits, function: Callable[..., Any], args: Any, kwargs: Any, frame: FrameType
    ) -> Any:
        """Runs a function that code of the compiler's calls without torch's dispatcher, and logs it as an operator."""
        start_ns = clock_ns()
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            self._on_operator_error()
            if is_out_of_memory(error):
                self._note_failed(operator, args, kwargs, start_ns, frame, error)
            raise
        end_ns = clock_ns()
        try:
            with self._lock, _no_functions():
                self._add(operator, args, kwargs, result, start_ns, end_ns, frame)
        except Exception as error:  # noqa: BLE001 - whatever fails in here must not reach the job
            self._on_fault(error)
        return result

    def _run_higher_order(self, operator: OperatorTraits, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a higher-order operator and logs the operators inside it, or else itself as one operator."""
        if dispatch_modes.is_traced():
            return dispatch_modes.run_below(func, args, kwargs)
        first_op, start_ns = self._log.op_count, clock_ns()
        try:
            result = dispatch_modes.follow(self, func, args, kwargs)
            if result is NotImplemented:
                result = dispatch_modes.run_below(func, args, kwargs)
        except BaseException as error:
            self._on_operator_error()
            if self.is_on and self._log.op_count == first_op and is_out_of_memory(error):
                given = dispatch_modes.tensors_in((args, kwargs))
                self._note_failed(operator, given, None, start_ns, sys._getframe(1).f_back, error)
            raise
        if self.is_on and self._log.op_count == first_op:
            end_ns = clock_ns()
            try:
                with self._lock, _no_functions(), untraced():
                    given = dispatch_modes.tensors_in((args, kwargs))
                    span = self.rows.span
                    known = {span(tensor)[0] for tensor in given}
                    made = [each for each in dispatch_modes.tensors_in(result) if span(each)[0] not in known]
                    if given or made:
                        self._add(operator, given, None, made, start_ns, end_ns, sys._getframe(1).f_back)
                        self.not_followed.add(str(func))
            except Exception as error:  # noqa: BLE001 - whatever fails in here must not reach the job
                self._on_fault(error)
        return result

    def _note_failed(
        self, operator: OperatorTraits, args: Any, kwargs: Any, start_ns: int, frame: Any, error: BaseException
    ) -> None:
        """Logs an operator that ran out of memory: the last thing the job did."""
        try:
            with self._lock, _no_functions(), untraced():
                self._add(operator, args, kwargs, FAILED, start_ns, clock_ns(), frame)
                self._on_out_of_memory(error)
        except MemoryError:
            return  # no memory even for this; the buffered rows are written with the next flush
        except Exception as fault:  # noqa: BLE001 - whatever fails in here must not reach the job
            self._on_fault(fault)

    def intern(self, name: str) -> int:
        """Returns the number of an operator's name."""
        return self._log.intern("names", name)

    def begin_epoch(
        self,
        on_output: Callable[[torch.Tensor, int], None] | None,
        on_collective: Callable[[torch.Tensor], None] | None,
    ) -> None:
        """Prepares for a run of consecutive operators; on a device, their streams are recorded.

        Args:
            on_output: Called with every output tensor and the time; None if the event source needs no such call.
            on_collective: Called with every tensor of a collective; None if the event source needs no such call.
        """
        self.rows.begin_epoch(on_output, on_collective, has_streams=self.fake_type is None and _cuda.is_initialized())

    def is_here(self) -> bool:
        """Whether the mode is on this thread's stack: the thread it was pushed on, or one running its backward."""
        return any(
            torch._C._get_dispatch_stack_at(position) is self
            for position in range(torch._C._len_torch_dispatch_stack())
        )

    def slide_in(self) -> None:
        """Inserts the mode below all modes on the stack."""
        super().slide_in()
        self.is_on = True

    def slide_out(self) -> None:
        """Removes the mode from the stack, keeping the order of the others."""
        self.is_on = False
        super().slide_out()
