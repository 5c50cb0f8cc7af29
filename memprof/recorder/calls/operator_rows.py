"""The rows of operators: when each ran, where it was called from, and which memory it touched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import torch

from memprof.phases import named_phase
from memprof.recorder.calls import operator_traits
from memprof.recorder.calls.module_registry import ModuleRegistry
from memprof.recorder.calls.operator_traits import OperatorTraits, TouchLog, tensors_of
from memprof.recorder.calls.stacks import CHECKPOINT_FILE, StackTable
from memprof.recorder.calls.torch_state import hooks_of_job
from memprof.recorder.log import RawLog
from memprof.recorder.steps.progress import OpenCall, Progress
from memprof.trace.files.spool import (
    FLAG_COLLECTIVE,
    FLAG_EVAL_MODE,
    FLAG_GRAD_ENABLED,
    FLAG_HOOKED,
    FLAG_IN_CLOSURE,
    FLAG_IN_REGION,
    FLAG_RECOMPUTE,
    NAME_SHIFT,
    OPTIMIZER,
    OTHER_THREAD,
)

_current_node = torch._C._current_autograd_node
_sequence_number = torch._C._autograd._get_sequence_nr
_is_grad_enabled = torch.is_grad_enabled
_get_ident = threading.get_ident
_ACCUMULATE = 2**63  # largest sequence number; AccumulateGrad nodes have it
#: Result of an operator that raised.
FAILED = object()


class OperatorObserver(Protocol):
    """Is called after every operator.

    Attributes:
        span: Returns the address of a tensor's memory and its bytes.
    """

    span: Callable[[torch.Tensor], tuple[int, int]]

    def begin_epoch(
        self,
        on_output: Callable[[torch.Tensor, int], None] | None,
        on_collective: Callable[[torch.Tensor], None] | None,
        *,
        has_streams: bool,
    ) -> None:
        """Prepares for a run of consecutive operators; as in `OperatorRows`."""

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
        """Observes an operator that has run; as in `OperatorRows`."""


class OperatorRows:
    """Logs operators after they ran: their position in the job, and the memory they touched.

    Attributes:
        on_collective: Called with every tensor of a collective, if the event source needs it; else None.
        find_place: Returns the module and the stack of an operator that compiled code called, None for others. Called
            with the calling frame, the positions of the arguments it writes to, the open module call, and the numbers
            of the autograd nodes made last and running.
        stacks: Numbers Python stacks.
        registry: Numbers modules.
    """

    def __init__(
        self,
        log: RawLog,
        progress: Progress,
        stacks: StackTable,
        registry: ModuleRegistry,
        after_operator: Callable[[int, bool], None],
    ) -> None:
        """Stores the recorder's shared components.

        Args:
            log: Destination of the rows.
            progress: The job's position within the step.
            stacks: Numbers Python stacks.
            registry: Numbers modules.
            after_operator: Called with the time and whether backward is running, after each operator.
        """
        self._log = log
        self._progress = progress
        self.stacks = stacks
        self.registry = registry
        self._after_operator = after_operator
        self._touched = TouchLog(log)
        self._touch = self._touched.add
        self._thread = _get_ident()
        self._current_stream: Callable[[], int] | None = None
        self._stream = 0
        self.on_collective: Callable[[torch.Tensor], None] | None = None
        self.find_place: Callable[..., tuple[int, int] | None] | None = None

    @property
    def span(self) -> Callable[[torch.Tensor], tuple[int, int]]:
        """Returns the address of a tensor's memory and the tensor's own bytes; a dry run has addresses of its own."""
        return self._touched.span

    @span.setter
    def span(self, span: Callable[[torch.Tensor], tuple[int, int]]) -> None:
        self._touched.span = span

    def begin_epoch(
        self,
        on_output: Callable[[torch.Tensor, int], None] | None,
        on_collective: Callable[[torch.Tensor], None] | None,
        *,
        has_streams: bool,
    ) -> None:
        """Prepares for a run of consecutive operators, in this thread and where its backward runs.

        Args:
            on_output: Called with every output tensor and the time, if the event source needs it; else None.
            on_collective: New value of `on_collective`.
            has_streams: Whether they run on streams of a device, which are recorded.
        """
        self._touched.on_output, self.on_collective = on_output, on_collective
        self._thread = _get_ident()
        self._current_stream = _current_cuda_stream if has_streams else None

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
        """Logs an operator that has run.

        Args:
            operator: The operator.
            args: Its arguments.
            kwargs: Its keyword arguments, None for none.
            result: What it returned, `FAILED` if it raised.
            start_ns: When it started.
            end_ns: When it ended.
            frame: The frame that called it.
        """
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
        call = progress.calls[-1] if progress.calls else None
        call_number, module = (-1, -1) if call is None else (call.number, call.module)
        if node is None:
            node_sequence = -1
            stack = self.stacks.number(frame, -1 if call is None else call.stack)
            storing = self.stacks.storing[stack]
            if storing >= 0 and phase != OPTIMIZER:
                phase = storing
            name = named_phase()
            if name:
                flags |= log.phase_number(name) + 1 << NAME_SHIFT
            hooks = hooks_of_job()
            if hooks and progress.is_hooked(hooks):
                flags |= FLAG_HOOKED
        else:
            node_sequence, module, stack, recomputes = self._in_backward(node, call, frame, is_elsewhere, grad_enabled)
            flags |= recomputes
        if self.find_place is not None:
            place = self.find_place(frame, operator.mutated, call, sequence - 1, node_sequence)
            if place is not None:
                (module, stack), flags = place, flags | FLAG_IN_REGION
        if operator_traits.sequence >= 0:  # rerun by a policy: it belongs where it ran first
            flags |= FLAG_RECOMPUTE
            node_sequence, module = operator_traits.sequence - 1, -1
        read_bytes, written_bytes = self._touch(op, operator, args, kwargs, result, flags, end_ns)
        if operator.flags & FLAG_COLLECTIVE and self.on_collective is not None:
            for tensor in tensors_of([*args, *(kwargs or {}).values(), result]):
                self.on_collective(tensor)
        is_counted = operator.has_flops and result is not FAILED
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

    def _in_backward(
        self, node: Any, call: OpenCall | None, frame: FrameType | None, is_elsewhere: bool, grad_enabled: bool
    ) -> tuple[int, int, int, int]:
        """Returns where an operator of backward belongs.

        Returns:
            The number of its node, its module, its stack (-1 for one that autograd runs itself), and the flag of a
            recomputation or 0.
        """
        module = -1 if call is None else call.module
        node_sequence = node._sequence_nr()
        if node_sequence >= _ACCUMULATE:
            node_sequence = -2
            variable = getattr(node, "variable", None)
            module = self.registry.parameter(variable)[1] if variable is not None else -1
        elif is_elsewhere and not grad_enabled and _is_in_checkpoint(frame):
            node_sequence += OTHER_THREAD
        if not grad_enabled:
            stack = self.stacks.in_backward(frame, -1 if call is None else call.stack)
            return node_sequence, module, stack, 0
        stack = self.stacks.number(frame, -1 if call is None else call.stack)
        recomputes = (call is not None and call.is_recompute) or self.stacks.has_checkpoint(stack)
        return node_sequence, module, stack, FLAG_RECOMPUTE if recomputes else 0


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
