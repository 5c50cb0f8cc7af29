"""Monitors how a loop computes gradients under accumulate; rejects loops that micro-batches would silently change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch

from memprof.errors import PolicyError
from memprof.policies.accumulate.policy import BY_HAND, CHANGED, NOT_A_MEAN
from memprof.policies.accumulate.round import Round
from memprof.policies.runtime.replaced import OWN_TYPES, replace


class Gradients:
    """The gradients of a job's parameters as backward left them, to detect changes before step()."""

    def __init__(self, parameters: Callable[[], Iterable[torch.Tensor]], current: Round) -> None:
        self._parameters = parameters
        self._round = current
        self._left: dict[int, tuple[int, int]] = {}

    def note(self) -> None:
        """Records them at the end of a backward; in the last micro-batch they are complete and may be changed."""
        self._left = {} if self._round.is_last else self._versions()

    def require_untouched(self) -> None:
        """Checks that the gradients have not changed since.

        Raises:
            PolicyError: They have, as in scripts with their own clipping code.
        """
        if not self._left:
            return
        found, left = self._versions(), self._left
        self._left = {}
        if any(found.get(key, version) != version for key, version in left.items()):
            raise PolicyError(CHANGED)

    def _versions(self) -> dict[int, tuple[int, int]]:
        return {
            id(parameter): (id(gradient), gradient._version)
            for parameter in self._parameters()
            if parameter.is_leaf and (gradient := parameter.grad) is not None and type(gradient) in OWN_TYPES
        }


def refuse_gradients_of_gradients(undo: ExitStack, current: Round) -> None:
    """Rejects losses computed from gradients of the parameters, which are not a mean over the samples of a batch."""

    def wrap(before: Any) -> Any:
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            has_graph = kwargs.get("create_graph", args[2] if len(args) > 2 else False)
            given = [inputs] if isinstance(inputs, torch.Tensor) else inputs
            if current.is_split and any(isinstance(each, torch.nn.Parameter) for each in given):
                if has_graph:
                    raise PolicyError(NOT_A_MEAN)
                current.returned = True
            return before(outputs, inputs, *args, **kwargs)

        return grad

    undo.callback(replace(torch.autograd, "grad", wrap))


def require_backward(current: Round) -> None:
    """Checks that gradients come from backward(), which accumulates those of the micro-batches.

    Raises:
        PolicyError: step() was called in a micro-batch without one.
    """
    if current.is_split and not current.backwards_here:
        raise PolicyError(BY_HAND)
