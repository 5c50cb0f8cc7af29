"""The rows of module calls: which module ran when, called by which, from which line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.calls.module_registry import ModuleRegistry
from memprof.recorder.calls.stacks import StackTable
from memprof.recorder.calls.torch_state import CHECKPOINT, hooks_of_job, untraced
from memprof.recorder.clock import clock_ns
from memprof.recorder.log import RawLog
from memprof.recorder.memory.inventory import Inventory
from memprof.recorder.steps.progress import OpenCall, Progress, TrainedModels
from memprof.trace.files.spool import FLAG_CALL_HOOKS, FLAG_CALL_RECOMPUTE


class CallLog:
    """Logs the module calls of one thread, and moves its position with them.

    Attributes:
        in_evaluation: The last model called outside backward is trained by the job, and was in evaluation mode.
    """

    def __init__(
        self,
        log: RawLog,
        progress: Progress,
        stacks: StackTable,
        registry: ModuleRegistry,
        trained: TrainedModels,
        inventory: Inventory,
        on_call: Callable[[], None],
    ) -> None:
        """Stores the recorder's shared components.

        Args:
            log: Destination of the rows.
            progress: The job's position within the step; holds the open calls.
            stacks: Numbers Python stacks.
            registry: Numbers modules.
            trained: Says which models the job trains.
            inventory: States what a model is called with.
            on_call: Called when a module call begins, once its module has a number.
        """
        self.in_evaluation = False
        self._log = log
        self._progress = progress
        self._stacks = stacks
        self._registry = registry
        self._trained = trained
        self._inventory = inventory
        self._on_call = on_call
        self._count = 0

    def open(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpenCall:
        """Records the start of a module call; called by the function that the function around the call calls."""
        progress = self._progress
        is_backward = torch._C._current_graph_task_id() != -1
        outer = progress.calls[-1] if progress.calls else None
        stack = self._stacks.number(sys._getframe(2), outer.stack if outer else -1)
        module_number = self._registry.number(module)
        if outer is None and not is_backward:
            with torch._C.DisableTorchFunction(), untraced():
                is_in_function = self._stacks.is_in_function(stack)
                self._trained.begin_call(progress, module, module_number, is_in_function=is_in_function)
                self.in_evaluation = progress.is_eval_mode
                self._inventory.inputs(args, kwargs)
        self._on_call()
        call = OpenCall(
            number=self._count,
            module=module_number,
            parent=outer.number if outer else -1,
            first_op=self._log.op_count,
            enter_ns=clock_ns(),
            stack=stack,
            is_recompute=is_backward,
            hooks=(hooks := hooks_of_job()),
            is_hooked=bool(hooks) and (hooks != CHECKPOINT or (outer is not None and outer.is_hooked)),
        )
        self._count += 1
        progress.calls.append(call)
        return call

    def close(self, call: OpenCall) -> None:
        """Records the end of a module call, and of nested calls whose end was not reported."""
        calls = self._progress.calls
        if call not in calls:
            return
        while calls.pop() is not call:
            pass
        flags = (FLAG_CALL_RECOMPUTE if call.is_recompute else 0) | (FLAG_CALL_HOOKS if call.enters_hooks else 0)
        now_ns, end_op = clock_ns(), self._log.op_count
        self._log.calls.extend(
            (call.number, call.module, call.parent, call.first_op, end_op, call.enter_ns, now_ns, flags)
        )
