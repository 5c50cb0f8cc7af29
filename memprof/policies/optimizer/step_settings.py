"""Has values that an optimizer's step changes, such as a count of steps, change once for the updates of all parameters.

Such values are settings of a group or attributes of the optimizer: numbers, or tensors that the step writes to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memprof.errors import PolicyError
from memprof.policies.optimizer.refusals import TOGETHER
from memprof.policies.runtime.replaced import has_values

#: What `Updates.single` replaces for the update of one parameter.
_REPLACED = frozenset(("params", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"))


@dataclass(frozen=True)
class _Changes:
    """What one call of a step has changed in a dictionary: its entries, and the values of tensors in it."""

    values: dict[str, Any]
    entries: dict[str, Any]
    tensors: list[tuple[torch.Tensor, torch.Tensor]]


def _results(changes: _Changes) -> str:
    """Returns the numbers that a call has left, those in tensors included."""
    numbers = [(key, value) for key, value in changes.entries.items() if isinstance(value, (int, float))]
    return repr([*numbers, *(value.tolist() for _, value in changes.tensors if has_values(value))])


class StepSettings:
    """The changes of one step, not yet in effect."""

    def __init__(self) -> None:
        """Starts without changes."""
        #: By the dictionary's id.
        self._changes: dict[int, _Changes] = {}

    @contextmanager
    def unchanged(self, values: dict[str, Any]) -> Iterator[None]:
        """Restores a dictionary after one update; what that has changed takes effect in ``end_round``.

        Args:
            values: A group, or the attributes of an optimizer.

        Raises:
            PolicyError: The update of another parameter in the same step has changed it to something else.
        """
        before = dict(values)
        copies = [
            (value, value._version, value.detach().clone()) for value in values.values() if type(value) is torch.Tensor
        ]
        try:
            yield
        finally:
            entries = {
                key: value
                for key, value in values.items()
                if key not in _REPLACED and (key not in before or value is not before[key])
            }
            for key in entries.keys() - before.keys():
                del values[key]
            values.update(before)
            tensors = []
            for value, version, copy in copies:
                if value._version != version:
                    tensors.append((value, value.detach().clone()))
                    value.detach().copy_(copy)
            known = self._changes.get(id(values))
            self._changes[id(values)] = _Changes(values, entries, tensors)
        if known is not None and _results(known) != _results(self._changes[id(values)]):
            raise PolicyError(TOGETHER)

    def end_round(self) -> None:
        """Applies the changes of the latest update to each dictionary."""
        for changes in self._changes.values():
            changes.values.update(changes.entries)
            for tensor, value in changes.tensors:
                tensor.detach().copy_(value)
        self._changes.clear()
