"""Logs every operator of the recorded thread: when it ran, which memory it touched, where it was called from."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from memprof.phases import named_phase
from memprof.recorder.calls import higher_order, repeats
from memprof.recorder.calls.module_registry import ModuleRegistry
from memprof.recorder.calls.operator_traits import OperatorTraits
from memprof.recorder.calls.sliding import SlidingMode, leaves_operators
from memprof.recorder.calls.stacks import CHECKPOINT_FILE, StackTable
from memprof.recorder.calls.untraced import untraced
from memprof.recorder.calls.wrapped_numbers import with_tensors
from memprof.recorder.clock import clock_ns
from memprof.recorder.log import RawLog
from memprof.recorder.memory.out_of_memory import is_out_of_memory
from memprof.recorder.steps.progress import Progress
from memprof.trace.files.spool import (
    FLAG_EVAL_MODE,
    FLAG_GRAD_ENABLED,
    FLAG_IN_CLOSURE,
    FLAG_MUTATES,
    FLAG_RECOMPUTE,
    FLAG_VIEW,
    MUTATE,
    NAME_SHIFT,
    OPTIMIZER,
    OTHER_THREAD,
    READ,
    WRITE,
)

_current_node = torch._C._current_autograd_node
_sequence_number = torch._C._autograd._get_sequence_nr
_is_grad_enabled = torch.is_grad_enabled
_get_ident = threading.get_ident
_get_mode = torch._C._get_dispatch_mode
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_DEVICE = torch.ops.prim.device.default
_Tensor = torch.Tensor
_LISTS = (list, tuple)
_ACCUMULATE = 2**63  # largest sequence number; AccumulateGrad nodes have it
_cuda: Any = torch.cuda  # not annotated in torch
_FAILED = object()  # result of an operator that raised


class OperatorMode(SlidingMode):
    """Logs operators while it is on the dispatch stack.

    It sits at the bottom of the stack, below any mode of the user's, so that theirs are entered and left as if it
    were absent. It declines operators on tensor subclasses and sees the plain operators they decompose into.

    Attributes:
        on_output: Called with every output tensor and the time, if the event source needs it; else None.
        is_on: Whether it logs.
        span: Returns the address of a tensor's memory and the tensor's own bytes.
        fake_type: Type of the fake tensors of a dry run; None in a real run.
        not_followed: Higher-order operators logged as one operator each: the operators inside were not recorded.
    """

    def __init__(
        self,
        log: RawLog,
        progress: Progress,
        stacks: StackTable,
        registry: ModuleRegistry,
        after_operator: Callable[[int, bool], None],
        on_fault: Callable[[Exception], None],
        on_operator_error: Callable[[], None],
        on_out_of_memory: Callable[[BaseException], None],
    ) -> None:
        """Stores the recorder's shared components.

        Args:
            log: Destination of the rows.
            progress: The job's position within the step.
            stacks: Numbers Python stacks.
            registry: Numbers modules.
            after_operator: Called with the time and whether backward is running, after each operator.
            on_fault: Called when logging itself failed; the job continues.
            on_operator_error: Called when an operator of the job raised, before the error propagates.
            on_out_of_memory: Called with the error when the operator logged last ran out of memory.
        """
        super().__init__()  # type: ignore[no-untyped-call]  # torch's base is not annotated
        self._log = log
        self._progress = progress
        self._stacks = stacks
        self._registry = registry
        self.on_output: Callable[[torch.Tensor, int], None] | None = None
        self._thread = _get_ident()
        self._lock = threading.RLock()
        self._current_stream: Callable[[], int] | None = None
        self._stream = 0
        self._after_operator = after_operator
        self._on_fault = on_fault
        self._on_operator_error = on_operator_error
        self._on_out_of_memory = on_out_of_memory
        self._operators: dict[Any, OperatorTraits] = {}
        self._tensor_number = log.tensor_number
        self.is_on = False
        self.span = _span
        self.fake_type = None
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
                with self._lock, torch._C.DisableTorchFunction(), untraced():
                    self._note(operator, args, kwargs, result, start_ns, end_ns, sys._getframe().f_back)
            except Exception as error:  # noqa: BLE001 - whatever fails in here must not reach the job
                self._on_fault(error)
        return result

    def _run_higher_order(self, operator: OperatorTraits, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a higher-order operator and logs the operators inside it, or else itself as one operator."""
        if higher_order.is_traced():
            return higher_order.run_below(func, args, kwargs)
        first_op, start_ns = self._log.op_count, clock_ns()
        try:
            result = higher_order.follow(self, func, args, kwargs)
            if result is NotImplemented:
                result = higher_order.run_below(func, args, kwargs)
        except BaseException as error:
            self._on_operator_error()
            if self.is_on and self._log.op_count == first_op and is_out_of_memory(error):
                given = higher_order.tensors_in((args, kwargs))
                self._note_failed(operator, given, None, start_ns, sys._getframe(1).f_back, error)
            raise
        if self.is_on and self._log.op_count == first_op:
            end_ns = clock_ns()
            try:
                with self._lock, torch._C.DisableTorchFunction(), untraced():
                    given = higher_order.tensors_in((args, kwargs))
                    known = {self.span(tensor)[0] for tensor in given}
                    made = [each for each in higher_order.tensors_in(result) if self.span(each)[0] not in known]
                    if given or made:
                        self._note(operator, given, None, made, start_ns, end_ns, sys._getframe(1).f_back)
                        self.not_followed.add(str(func))
            except Exception as error:  # noqa: BLE001 - whatever fails in here must not reach the job
                self._on_fault(error)
        return result

    def _note_failed(
        self, operator: OperatorTraits, args: Any, kwargs: Any, start_ns: int, frame: Any, error: BaseException
    ) -> None:
        """Logs an operator that ran out of memory: the last thing the job did."""
        try:
            with self._lock, torch._C.DisableTorchFunction(), untraced():
                self._note(operator, args, kwargs, _FAILED, start_ns, clock_ns(), frame)
                self._on_out_of_memory(error)
        except MemoryError:
            return  # no memory even for this; the buffered rows are written with the next flush
        except Exception as fault:  # noqa: BLE001 - whatever fails in here must not reach the job
            self._on_fault(fault)

    def _note(
        self,
        operator: OperatorTraits,
        args: Any,
        kwargs: Any,
        result: Any,
        start_ns: int,
        end_ns: int,
        frame: Any,
    ) -> None:
        log = self._log
        progress = self._progress
        op = log.op_count
        node = _current_node()
        flags = operator.flags
        grad_enabled = _is_grad_enabled()
        is_elsewhere = node is not None and _get_ident() != self._thread
        if not is_elsewhere:
            sequence = _sequence_number()
        else:  # a device's backward runs in its own thread, with its own node count
            sequence = OTHER_THREAD + _sequence_number() if grad_enabled else progress.sequence
        if grad_enabled:
            flags |= FLAG_GRAD_ENABLED
        makes_node = sequence != progress.sequence
        if not is_elsewhere:
            progress.sequence = sequence
        phase = progress.phase(node is not None, makes_node and grad_enabled)
        if phase == OPTIMIZER and progress.in_closure:
            flags |= FLAG_IN_CLOSURE
        if progress.is_eval_mode:
            flags |= FLAG_EVAL_MODE
        calls = progress.calls
        if calls:
            call = calls[-1]
            call_number, outer_stack, module = call.number, call.stack, call.module
        else:
            call, call_number, outer_stack, module = None, -1, -1, -1
        node_sequence = -1
        stack = -1
        if node is None:
            stack = self._stacks.number(frame, outer_stack)
            storing = self._stacks.storing[stack]
            if storing >= 0 and phase != OPTIMIZER:
                phase = storing
            name = named_phase()
            if name:
                flags |= self._log.phase_number(name) + 1 << NAME_SHIFT
        else:
            node_sequence = node._sequence_nr()
            if node_sequence >= _ACCUMULATE:
                node_sequence = -2
                variable = getattr(node, "variable", None)
                module = self._registry.parameter(variable)[1] if variable is not None else -1
            elif is_elsewhere and not grad_enabled and _is_in_checkpoint(frame):
                node_sequence += OTHER_THREAD
            if grad_enabled:
                stack = self._stacks.number(frame, outer_stack)
                if (call is not None and call.is_recompute) or self._stacks.has_checkpoint(stack):
                    flags |= FLAG_RECOMPUTE
        if repeats.sequence >= 0:  # rerun by a policy: it belongs where it ran first
            flags |= FLAG_RECOMPUTE
            node_sequence, module = repeats.sequence - 1, -1
        # Inputs.
        touches = log.touches
        span = self.span
        read_bytes = written_bytes = 0
        mutated = operator.mutated
        for position, value in enumerate(args):
            if isinstance(value, _Tensor):
                address, size = span(value)
                read_bytes += size
                if position in mutated:
                    written_bytes += size
                    touches.extend((op, address, size, MUTATE, -1))
                else:
                    touches.extend((op, address, size, READ, -1))
            elif type(value) in _LISTS:
                for item in value:
                    if isinstance(item, _Tensor):
                        address, size = span(item)
                        read_bytes += size
                        if position in mutated:
                            written_bytes += size
                            touches.extend((op, address, size, MUTATE, -1))
                        else:
                            touches.extend((op, address, size, READ, -1))
        if kwargs:
            for key, value in kwargs.items():
                for item in value if type(value) in _LISTS else (value,):
                    if isinstance(item, _Tensor):
                        address, size = span(item)
                        read_bytes += size
                        if key in operator.mutated_keywords:
                            written_bytes += size
                            touches.extend((op, address, size, MUTATE, -1))
                        else:
                            touches.extend((op, address, size, READ, -1))
        # Outputs. A view's base is already an input; so is an in-place result.
        makes_new = not flags & (FLAG_VIEW | FLAG_MUTATES)
        if makes_new or self.on_output is not None:
            for item in (result,) if isinstance(result, _Tensor) else _flat(result):
                if makes_new:
                    address, size = span(item)
                    touches.extend((op, address, size, WRITE, self._tensor_number(item)))
                    written_bytes += size
                if self.on_output is not None:
                    self.on_output(item, end_ns)  # even for an in-place operator: it may have resized its input
        is_counted = operator.has_flops and result is not _FAILED
        flops = operator.count_flops(args, kwargs, result) if is_counted else 0
        log.operators.extend(
            (
                start_ns,
                end_ns,
                operator.name,
                sequence,
                node_sequence,
                module,
                phase,
                flags,
                call_number,
                stack,
                flops,
                read_bytes,
                written_bytes,
                progress.micro_batch,
            )
        )
        log.op_count = op + 1
        if self._current_stream is not None:
            stream = self._current_stream()
            if stream != self._stream:
                self._stream = stream
                log.streams.extend((op, stream))
        self._after_operator(end_ns, node is not None)

    def begin_epoch(self, on_output: Callable[[torch.Tensor, int], None] | None) -> None:
        """Prepares for a run of consecutive operators; on a device, their streams are recorded.

        Args:
            on_output: New value of `on_output`.
        """
        self.on_output = on_output
        self._thread = _get_ident()
        is_on_cuda = self.fake_type is None and _cuda.is_initialized()
        self._current_stream = _current_cuda_stream if is_on_cuda else None

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


def _is_in_checkpoint(frame: FrameType | None) -> bool:
    """Whether a frame runs inside a nested backward of torch.utils.checkpoint."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(CHECKPOINT_FILE):
            return True
        frame = frame.f_back
    return False


def _current_cuda_stream() -> int:
    """Returns the stream of the current thread on its CUDA device; 0 for the default stream."""
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the address of a tensor's storage and the tensor's own bytes; (0, 0) without a storage."""
    try:
        return tensor.untyped_storage().data_ptr(), tensor.nbytes
    except (NotImplementedError, RuntimeError):
        return 0, 0  # sparse, opaque and meta tensors


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, _Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _flat(item)]
    return []
