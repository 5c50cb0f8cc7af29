"""Buckets of gradients of DistributedDataParallel as its communication hooks see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as _distributed

from memprof.recorder.dry.ranks.works import Done

#: torch.distributed, whose names below are not all exported for type checkers.
dist: Any = _distributed


@dataclass
class Bucket:
    """A bucket of gradients.

    Attributes:
        members: Numbers of its parameters.
        buffer: Their gradients one after the other, one-dimensional.
        missing: Gradients that have not arrived yet in this backward.
        result: The tensor that a hook returned; it is kept until the next backward, as torch's views of it are.
    """

    members: list[int]
    buffer: torch.Tensor
    missing: int = 0
    result: torch.Tensor | None = None


class GradBucket:
    """What a communication hook receives, with the methods of torch's class of this name."""

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        gradients: list[torch.Tensor],
        parameters: list[torch.Tensor],
        *,
        is_last: bool,
    ) -> None:
        """Keeps what it consists of.

        Args:
            index: The bucket's number.
            buffer: All gradients one after the other.
            gradients: Views of the buffer.
            parameters: The parameters of the gradients.
            is_last: Whether it is the last bucket of a backward.
        """
        self._index, self._buffer, self._gradients, self._parameters = index, buffer, gradients, parameters
        self._is_last = is_last

    def index(self) -> int:
        """Returns the bucket's number."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Returns all gradients one after the other."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces the buffer that the hook reads."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Returns the gradients."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        """Returns the parameters."""
        return self._parameters

    def is_last(self) -> bool:
        """Returns whether it is the last bucket of a backward."""
        return self._is_last


def builtin_hook(kind: Any) -> Callable[[Any, GradBucket], Done]:
    """Returns the hook that stands for one of torch's that are written in C++.

    Source: torch/csrc/distributed/c10d/default_comm_hooks.cpp.

    Args:
        kind: A member of ``BuiltinCommHookType``.
    """

    def reduce(_: Any, bucket: GradBucket) -> Done:
        return Done([bucket.buffer()])

    def compress(_: Any, bucket: GradBucket) -> Done:
        compressed = bucket.buffer().to(torch.float16)
        return Done([bucket.buffer().copy_(compressed)])

    return compress if kind == dist.BuiltinCommHookType.FP16_COMPRESS else reduce
