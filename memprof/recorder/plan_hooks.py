"""Interface through which a plan is applied to a recorded job."""

from __future__ import annotations

from typing import Protocol

import torch


class PlanHooks(Protocol):
    """Callbacks from the recorder to a plan. Only an exception that ends the job (SystemExit) propagates."""

    def before_call(self, module: torch.nn.Module) -> None:
        """Called for every module call made with gradients enabled, before the call and before recording begins."""

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after every update, before a recording begins with the following step."""
