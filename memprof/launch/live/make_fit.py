"""Makes a model fit a budget from the user's own code: `memprof.make_fit(model, optimizer, budget="8GiB")`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memprof.errors import PolicyError, UsageError
from memprof.launch.apply import optimizers_in
from memprof.launch.live.live_fit import LiveFit
from memprof.machines.budget import parse_budget
from memprof.planners.search.workbench import allowed_names
from memprof.policies.registry import policy_types
from memprof.policies.runtime.model_names import unwrapped

#: A placeholder peak to validate a budget with before anything is recorded, so that errors surface at once.
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
    """Makes a training job fit a budget while it trains.

        memprof.make_fit(model, optimizer, budget="8GiB")

    Call it before the loop. It observes the first steps, searches for the fastest plan that fits, applies it to the
    model between two steps, prints it, and compares a step under it with the prediction. If the job already fits, or
    no plan does, it is left unmodified. Losses stay bit-identical unless policies are allowed that change them.

    Args:
        model: The model that is trained.
        optimizer: Its optimizer, or several.
        budget: Maximum live bytes: ``"8GiB"``, ``"60%"`` of the job's peak, or a number.
        allow: Names of policies to allow instead of checkpoint and swap; precision, loss and compress change the
            numerics.
        forbid: Names of the forbidden policies.
        max_slowdown: Maximum increase of the step time: 0.15 for 15 %.
        time_limit: Time limit of a search, in seconds.

    Returns:
        The fit in progress; ``undo()`` reverts it.

    Raises:
        UsageError: The budget is invalid, or another make_fit is active.
        PolicyError: Unknown policy, or one that cannot be applied in the middle of training.
    """
    if not isinstance(model, torch.nn.Module):
        raise PolicyError(f"make_fit takes a torch.nn.Module, not a {type(model).__name__}.")
    optimizers = optimizers_in(optimizer)
    if not optimizers:
        raise PolicyError("make_fit needs the optimizer: its updates mark the ends of steps.")
    parse_budget(str(budget), _SOME_PEAK_BYTES)
    if max_slowdown is not None and not 0 <= max_slowdown < float("inf"):
        raise UsageError(f"invalid slowdown {max_slowdown!r}: write a fraction such as 0.15.")
    policies = live_policies(tuple(allow), tuple(forbid))
    made = LiveFit(unwrapped(model), optimizers, str(budget), policies, max_slowdown, time_limit)
    made.start()
    return made


def live_policies(allow: tuple[str, ...], forbid: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the usable policies.

    Args:
        allow: Names of the allowed policies; none for those that are ``tried_live``.
        forbid: Names of the forbidden policies.

    Raises:
        PolicyError: Unknown policy, or one that cannot be applied in the middle of training.
    """
    default = tuple(kind.name for kind in policy_types() if kind.tried_live)
    names = allowed_names(allow, forbid, default)
    for kind in policy_types():
        if kind.name in names and kind.live_refusal:
            raise PolicyError(
                f"{kind.name} cannot be applied in the middle of training: {kind.live_refusal}. Find a plan with "
                "memprof fit, and apply it before the first step with memprof.apply."
            )
    if not names:
        raise PolicyError("no policy is left; allow one, or forbid fewer.")
    return tuple(sorted(names))
