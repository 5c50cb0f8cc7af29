"""What every job shares: the device it trains on, and the check that its model is the published one."""

from __future__ import annotations

import json
import os

import torch
from torch import nn

# A published job trains on CUDA; the meta device checks it anywhere.
DEVICE = torch.device(os.environ.get("JOB_DEVICE", "cuda"))
# The optimizer's state appears in the first step, the peak is steady from the second on.
STEPS = 3


def expect_parameters(model: nn.Module, count: int) -> None:
    """Raises ValueError if the model has not as many parameters as the published one."""
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != count:
        raise ValueError(f"the model has {found:,} parameters, the published one {count:,}")


def report_peak(**counters: int) -> None:
    """Prints the figures that the published script reports of itself, in bytes, as a line of JSON."""
    print(json.dumps({"published_counters": counters}), flush=True)
