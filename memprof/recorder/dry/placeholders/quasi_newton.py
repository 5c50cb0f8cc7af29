"""Lets LBFGS fill its history in a dry run, where no comparison of values ends its updates and line searches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

#: Evaluations of the loss after which the history is full: the first two add nothing to it.
_FIRST = 3


def end_updates(
    falling: Callable[[Callable[[], Any], int], AbstractContextManager[Callable[[], Any]]],
    count_search: Callable[[], Any],
) -> None:
    """Ends each update once the history is full, or after its largest number of iterations, and searches at once.

    Args:
        falling: Lets the loss that an update reads fall, for as many evaluations of it as given.
        count_search: Called for each line search, which stops at its first trial.
    """
    kind: Any = torch.optim.LBFGS
    module: Any = sys.modules[kind.__module__]  # torch.optim has no attribute of this name
    search, update = module._strong_wolfe, kind.step

    @wraps(search)
    def search_once(*given: Any, **settings: Any) -> Any:
        count_search()
        return search(*given, **{**settings, "max_ls": 0})

    @wraps(update)
    def update_until_full(optimizer: Any, closure: Any) -> Any:
        with falling(closure, optimizer.param_groups[0]["history_size"] + _FIRST) as evaluate:
            return update(optimizer, evaluate)

    module._strong_wolfe, kind.step = search_once, update_until_full
