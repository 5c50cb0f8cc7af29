"""Tracks the job's position in a training step, and which models it trains."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from memprof.recorder.calls.torch_state import CHECKPOINT, DISABLED
from memprof.recorder.memory.tensor_memory import parameters_of
from memprof.recorder.steps.rounds import OptimizerRounds
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

    @property
    def is_idle(self) -> bool:
        """Whether the step has run neither a forward, nor a backward, nor an update."""
        return self.base == OTHER and not (self.backward_rounds or self.was_backward or self.optimizer_depth)

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


class TrainedModels:
    """The models updated by an optimizer of the job; without an optimizer, those called with gradients on.

    Frozen teachers, encoders and target networks are in no optimizer. Results are cached for one step.
    """

    def __init__(self, rounds: OptimizerRounds) -> None:
        self._rounds = rounds
        self._updated: set[int] | None = None
        self._answers: dict[int, bool] = {}
        self._called: set[int] = set()
        self._differentiated: dict[int, weakref.ref[torch.Tensor]] = {}

    def begin_step(self) -> None:
        """Clears the cache: models may be frozen, and optimizers created, between two steps."""
        self._updated = None
        self._answers.clear()

    def begin_call(self, progress: Progress, module: torch.nn.Module, number: int, *, is_in_function: bool) -> None:
        """Notes in the job's progress what an outermost call outside backward begins."""
        if torch.is_grad_enabled():
            if number not in self._called and not self._rounds.has_optimizers:
                self._called.add(number)
                self._differentiated.update(
                    {id(each): weakref.ref(each) for each in parameters_of(module) if each.requires_grad}
                )
                self._answers.clear()
            progress.begin_model_call(module.training if self.is_trained(module, number) else None)
        elif not is_in_function and self.is_trained(module, number):
            progress.begin_evaluation()

    def is_trained(self, module: torch.nn.Module, number: int) -> bool:
        """Whether a job trains a model or a part of it.

        Args:
            module: The model.
            number: Its number in the registry.
        """
        known = self._answers.get(number)
        if known is None:
            known = self._answers[number] = any(self._is_updated(each) for each in parameters_of(module))
        return known

    def _is_updated(self, parameter: torch.Tensor) -> bool:
        if not self._rounds.has_optimizers:
            reference = self._differentiated.get(id(parameter))
            return reference is not None and reference() is parameter
        if self._updated is None:
            groups = (group for optimizer in self._rounds.alive() for group in optimizer.param_groups)
            self._updated = {id(each) for group in groups for each in group["params"]}
        return id(parameter) in self._updated
