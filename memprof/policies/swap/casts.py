"""Brings parameters in before the job casts or moves its model, which only changes what is in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memprof.policies.runtime.job import Job


def bring_in_for_casts(job: Job, module: torch.nn.Module, bring_in: Callable[[], Any]) -> None:
    """Brings in a module's own parameters before ``to``, ``double``, ``half`` and the like.

    Args:
        job: The job.
        module: Any of its modules.
        bring_in: Brings in those of its own parameters that are moved.
    """

    def casting(before: Any) -> Callable[..., Any]:
        def _apply(*args: Any, **kwargs: Any) -> Any:
            bring_in()
            return before(*args, **kwargs)

        return _apply

    job.replace_method(module, "_apply", casting)
