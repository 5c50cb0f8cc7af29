"""What a recorder is given: a plan that is applied to the job, and a dry run that computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from memprof.recorder.calls.operator_rows import OperatorRows
    from memprof.recorder.log import RawLog
    from memprof.recorder.memory.inventory import Inventory
    from memprof.recorder.operators import OperatorMode
    from memprof.recorder.profiler.sources import MemorySources
    from memprof.recorder.steps.usages import Usages


class PlanHooks(Protocol):
    """Callbacks from the recorder to a plan. Only an exception that ends the job (SystemExit) propagates."""

    def before_call(self, module: torch.nn.Module) -> None:
        """Called for every module call made with gradients enabled, before the call and before recording begins."""

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after every update, before a recording begins with the following step."""


class Reads(Protocol):
    """What a job reads from tensors: logged, or supplied by a dry run."""

    def begin_step(self, step: int, *, is_recorded: bool) -> None:
        """Notes the number of the step that begins, and whether it is recorded."""

    def close(self) -> None:
        """Called when the window is over."""

    def notes(self) -> list[str]:
        """Returns notes for the reader of the recording."""


class DryRun(Protocol):
    """The dry run of this process (memprof.virtual), which fits a recording to fake tensors."""

    @property
    def answers(self) -> Reads:
        """Supplies what the job reads."""

    def begin(self) -> None:
        """Computes nothing from now on."""

    def adopt(
        self,
        mode: OperatorMode,
        rows: OperatorRows,
        inventory: Inventory,
        sources: MemorySources,
        log: RawLog,
        usages: Usages,
    ) -> None:
        """Adapts the components of a recording."""

    def around(self, log: RawLog, after_operator: Callable[[int, bool], None]) -> Callable[[int, bool], None]:
        """Wraps the callback after each operator."""

    def begin_step(self, step: int) -> None:
        """Notes that a step begins."""

    def is_over(self) -> bool:
        """Whether the run has taken as long as it may."""

    def needs(self) -> Iterable[dict[str, Any]]:
        """Returns what the job pins on the host, for `memprof.trace.schema.HostNeeds`."""

    def postpones_end(self, end: Callable[[], None]) -> bool:
        """Returns whether the job goes on after its recording; `end` is called then."""

    def notes(self) -> list[str]:
        """Returns notes for the reader of the recording."""
