"""Tracks the job's position in a training step: phase, micro-batch, module call."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from memprof.recorder.calls.saved_hooks import CHECKPOINT, DISABLED
from memprof.trace.files.spool import BACKWARD, EVALUATION, FORWARD, OPTIMIZER, OTHER


@dataclass
class OpenCall:
    """An open module call.

    Attributes:
        number: Number of the call.
        module: Number of the module.
        parent: Number of the enclosing call, -1 for the outermost.
        first_op: Number of the next operator on entry.
        enter_ns: Its start time.
        stack: Number of the Python stack that made the call.
        is_recompute: The call repeats a forward inside backward.
        hooks: Hooks of the job for saved tensors that are the innermost on entry, as `hooks_of_job` numbers them.
        is_hooked: Whether these, or those around a checkpoint, take what is saved.
        enters_hooks: Whether operators in it are hooked by others.
    """

    number: int
    module: int
    parent: int
    first_op: int
    enter_ns: int
    stack: int
    is_recompute: bool
    hooks: int = 0
    is_hooked: bool = False
    enters_hooks: bool = False


@dataclass
class Progress:
    """The job's position in its step, maintained by the observers.

    A phase persists: once a model has been called, what follows is forward until backward begins, so that the loss
    computed outside any module belongs to it. Likewise, what follows the call of a trained model without gradients is
    evaluation, for as long as gradients are off.
    """

    base: int = OTHER
    micro_batch: int = 0
    backward_rounds: int = 0
    was_backward: bool = False
    optimizer_depth: int = 0
    optimizer_in_backward: bool = False
    optimizer_calls_depth: int = 0
    in_closure: bool = False
    sequence: int = 0
    is_evaluating: bool = False
    is_eval_mode: bool = False
    calls: list[OpenCall] = field(default_factory=list)

    def begin_step(self) -> None:
        """Restarts the micro-batch count; nodes created since the last operator seen do not belong to the next one."""
        self.micro_batch = 0
        self.backward_rounds = 0
        self.was_backward = False
        self.base = OTHER
        self._end_evaluation()
        self.sequence = torch._C._autograd._get_sequence_nr()

    def begin_model_call(self, trains: bool | None = None) -> None:
        """Notes that a model is called outside backward with gradients on.

        Args:
            trains: Whether a model that the job trains is in training mode; None for other models.
        """
        self.leave_backward()
        self.is_evaluating = False
        if trains is not None:
            self.is_eval_mode = not trains
        if self.backward_rounds > self.micro_batch:
            self.micro_batch = self.backward_rounds
        self.base = FORWARD

    def begin_evaluation(self) -> None:
        """Notes that a model that the job trains is called outside backward with gradients off."""
        self.leave_backward()
        self.is_evaluating = True

    def _end_evaluation(self) -> None:
        self.is_evaluating = self.is_eval_mode = False

    def is_hooked(self, hooks: int) -> bool:
        """Returns whether hooks of the job take what an operator saves, and marks the calls that have entered them.

        Args:
            hooks: The innermost ones, as `hooks_of_job` numbers them; not 0.
        """
        if hooks == CHECKPOINT:
            return bool(self.calls) and self.calls[-1].is_hooked
        for call in reversed(self.calls):
            if call.hooks == hooks != DISABLED:
                break
            call.enters_hooks = True
        return True

    def leave_backward(self) -> None:
        """Notes that backward, if it ran, is over."""
        if self.was_backward:
            self.was_backward = False
            self.backward_rounds += 1
            self.base = OTHER

    def begin_optimizer(self) -> None:
        """Notes the start of an optimizer's step."""
        if self.optimizer_depth == 0:
            self._end_evaluation()
            self.optimizer_in_backward = torch._C._current_graph_task_id() != -1
            self.optimizer_calls_depth = len(self.calls)
            self.in_closure = False
            if not self.optimizer_in_backward:
                self.leave_backward()
        self.optimizer_depth += 1

    def end_optimizer(self) -> None:
        """Notes the end of an optimizer's step."""
        self.optimizer_depth = max(0, self.optimizer_depth - 1)
        if self.optimizer_depth == 0 and not self.optimizer_in_backward:
            self.leave_backward()
            self.base = OTHER

    def phase(self, is_backward: bool, makes_node: bool) -> int:
        """Returns the phase of an operator: the innermost open one.

        Args:
            is_backward: A backward node is running it.
            makes_node: Autograd made a node for it: a forward operator, whoever called it. A closure called by an
                optimizer runs forward from there until backward, while gradients are on.
        """
        if self.optimizer_depth:
            if is_backward:
                if self.optimizer_in_backward:
                    return OPTIMIZER
                self.was_backward = True
                self.in_closure = False
                return BACKWARD
            if not self.optimizer_in_backward:
                self.leave_backward()
            if makes_node or len(self.calls) > self.optimizer_calls_depth:
                self.in_closure = True
            if self.in_closure and torch.is_grad_enabled():
                return FORWARD
            return OPTIMIZER
        if is_backward:
            self.was_backward = True
            self._end_evaluation()
            return BACKWARD
        if self.was_backward:
            self.leave_backward()
        if self.is_evaluating and (self.calls or not torch.is_grad_enabled()):
            return EVALUATION  # inside the call regardless of gradients: autocast casts weights with gradients on
        if makes_node:
            self.base = FORWARD
        if self.is_evaluating:
            self.is_evaluating = False
        return self.base
