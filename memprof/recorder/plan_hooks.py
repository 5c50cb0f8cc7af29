"""Where a plan comes into a job that is recorded."""

from __future__ import annotations

from typing import Protocol

import torch


class PlanHooks(Protocol):
    """What a recorder tells a plan. Only what it raises to end the job (SystemExit) passes through."""

    def before_call(self, module: torch.nn.Module) -> None:
        """Told of every module call made while gradients are recorded, before it and the recording begin."""

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Told of every update, before a recording begins with the step after it."""
