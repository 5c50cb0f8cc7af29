"""Draws the random numbers that a real run would draw, so that what is computed later from others is the same.

Batches, their lengths and their order are drawn from the same generators as initial weights and dropout, which a dry
run does not compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memprof.recorder.calls.dispatch_modes import map_tensors
from memprof.recorder.calls.torch_state import overloads, packets
from memprof.trace.operator_facts import DRAWS, DRAWS_ALONE

_aten = torch.ops.aten
_LISTS = (list, tuple)
_DRAWING = packets(DRAWS)
#: The most elements whose numbers are kept: those by which a job decides which layers or branches run (stochastic
#: depth, layer dropout).
_CERTAIN = packets(DRAWS_ALONE)
MOST_KEPT = 2**10
#: Most elements drawn in a dry run, half a second's work: after them the numbers differ from those of a real run.
_MOST_DRAWN = 2**25
#: Most elements drawn at once, for operators whose numbers are the same when they are drawn part by part.
_AT_ONCE = 2**20
_IN_PARTS = overloads("uniform_ normal_")


class RandomStream:
    """Advances the generators of the processor by what the operators of a dry run would draw."""

    def __init__(self) -> None:
        """Starts with nothing drawn."""
        self._left = _MOST_DRAWN
        self._noted: list[Callable[[], Any]] | None = None
        self._decides = False

    def note(self) -> list[Callable[[], Any]]:
        """Begins to note what is drawn, and returns the list."""
        self._noted, self._decides = [], False
        return self._noted

    def end_note(self, noted: list[Callable[[], Any]]) -> list[Callable[[], Any]] | None:
        """Returns functions that draw the same once more; None if drawn numbers may decide what a job does."""
        self._noted = None
        return None if self._decides else noted

    def draw(self, func: Any, args: Any, kwargs: Any, result: Any) -> torch.Tensor | None:
        """Draws an operator's numbers, unless too many have been needed; a few are drawn even then.

        Returns:
            The numbers, where there are few and none depends on a tensor; they are those of a real run as long as all
            before them were drawn.
        """
        packet = getattr(func, "overloadpacket", None)
        if packet not in _DRAWING:
            return None
        made = result[0] if isinstance(result, _LISTS) else result
        if not isinstance(made, torch.Tensor) or made.device.type != "cpu":
            return None
        if self._noted is not None and self._left:
            unseen: Any = torch._C._DisableTorchDispatch()
            with unseen:
                given = map_tensors(_shape, (made, args, kwargs))
            self._noted.append(lambda: self._draw(func, packet, given[1], given[2], given[0]))
        return self._draw(func, packet, args, kwargs, made)

    def _draw(self, func: Any, packet: Any, args: Any, kwargs: Any, made: torch.Tensor) -> torch.Tensor | None:
        if packet in _CERTAIN and made.untyped_storage().nbytes() <= MOST_KEPT * made.element_size():
            self._left -= min(made.numel(), self._left)
            self._decides = True
            drawn = func(*map_tensors(_zeros, args), **map_tensors(_zeros, kwargs))
            if drawn.dtype not in (torch.float32, torch.float64):  # types that numpy lacks
                return None
            return torch.from_numpy(drawn.numpy().copy())  # numpy's memory does not count as the job's
        if made.numel() > self._left:
            self._left = 0  # the next numbers would be others: no reason to draw them
            return None
        self._left -= made.numel()
        if func in _IN_PARTS and made.numel() > _AT_ONCE and made.is_contiguous():
            self._draw_in_parts(func, made, args[1:], kwargs)
        else:
            func(*map_tensors(_zeros, args), **map_tensors(_zeros, kwargs))
        return None

    @staticmethod
    def _draw_in_parts(func: Any, made: torch.Tensor, settings: Any, kwargs: Any) -> None:
        """Draws a contiguous tensor's numbers in little memory; the last part has its remainder.

        The processor draws normal numbers in groups of 16, and the last 16 anew if the size is no multiple of that
        (``normal_fill`` in torch's DistributionTemplates.h).
        """
        parts, remainder = divmod(made.numel(), _AT_ONCE)
        part = torch.empty((_AT_ONCE + remainder,), dtype=made.dtype)
        for _ in range(parts - 1):
            func(part[:_AT_ONCE], *settings, **kwargs)
        func(part, *settings, **kwargs)


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    places = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = places if tensor.numel() else 0
    return torch.zeros((count,), dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())
