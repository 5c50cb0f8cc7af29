"""Makes a model fit a budget from the user's own code: `memprof.make_fit(model, optimizer, budget="8GiB")`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memprof.errors import PolicyError, UsageError
from memprof.launch.apply import optimizers_in
from memprof.launch.live.live_fit import LiveFit
from memprof.launch.live.policies import live_policies
from memprof.machines.budget import parse_budget
from memprof.policies.runtime.wrappers import unwrapped

#: A peak to read a budget against before any was recorded, so that a mistake in it is told at once.
_SOME_PEAK_BYTES = 1 << 40


def make_fit(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    budget: str | int,
    *,
    allow: Iterable[str] = (),
    forbid: Iterable[str] = (),
    max_slowdown: float | None = None,
    time_limit: float = 30.0,
) -> LiveFit:
    """Makes a training job fit a budget, while it trains.

        memprof.make_fit(model, optimizer, budget="8GiB")

    Call it before the loop. It observes the first steps, searches for the fastest plan that fits, applies it to the
    model between two steps, says so, and compares a step under it with what was predicted. Where the job fits, or
    nothing fits, it is left as it is. Losses stay the same to the bit, unless policies are allowed that change them.

    Args:
        model: The model that is trained.
        optimizer: Its optimizer, or several.
        budget: Most bytes that may be allocated at once: ``"8GiB"``, ``"60%"`` of what the job needs, or a number.
        allow: Names of policies that may be used instead of checkpoint and swap; precision, loss and compress change
            the numbers.
        forbid: Names of policies that may not be used.
        max_slowdown: Most time that a step may take beyond what it takes now: 0.15 for 15 %.
        time_limit: Longest time that a search takes, in seconds.

    Returns:
        What it did so far; ``undo()`` takes it back.

    Raises:
        UsageError: The budget makes no sense, or another make_fit is at work.
        PolicyError: A policy is named that there is not, or that cannot be applied in the middle of training.
    """
    if not isinstance(model, torch.nn.Module):
        raise PolicyError(f"make_fit takes a torch.nn.Module, not a {type(model).__name__}.")
    optimizers = optimizers_in(optimizer)
    if not optimizers:
        raise PolicyError("make_fit needs the optimizer: its updates tell where steps end.")
    parse_budget(str(budget), _SOME_PEAK_BYTES)
    if max_slowdown is not None and not 0 <= max_slowdown < float("inf"):
        raise UsageError(f"{max_slowdown!r} is no slowdown: write a share such as 0.15.")
    policies = live_policies(tuple(allow), tuple(forbid))
    made = LiveFit(unwrapped(model), optimizers, str(budget), policies, max_slowdown, time_limit)
    made.start()
    return made
