"""What torch.distributed hands out in a dry run: works, futures, and buckets of gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.distributed as _distributed

#: torch.distributed, whose names below are not all exported for type checkers.
dist: Any = _distributed
#: Collectives whose first argument receives the result.
COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
)


class Work(dist.Work):  # type: ignore[misc]  # a class of C++'s
    """A collective, or a tensor being sent. Its tensors stay in memory as long as the job keeps this."""

    def __init__(self, tensors: Any) -> None:
        """Keeps the tensors."""
        super().__init__()
        self._tensors = tensors if isinstance(tensors, list) else [tensors]

    def wait(self, timeout: Any = None) -> bool:
        """Returns True without waiting."""
        return True

    def is_completed(self) -> bool:
        """Returns True."""
        return True

    is_success = is_completed

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors."""
        return self._tensors

    def get_future(self) -> Done:
        """Returns a future of the tensors."""
        return Done(self._tensors)


class Sent(Work):
    """A tensor being sent. With NCCL it stays in memory until the job waits for it."""

    def wait(self, timeout: Any = None) -> bool:
        """Returns True without waiting."""
        if self._tensors and self._tensors[0].is_cuda:
            self._tensors = []
        return True


class Done(torch.futures.Future[Any]):
    """A future that has its value: torch's own would look for the device memory of tensors, which have none here."""

    def __init__(self, value: Any) -> None:
        """Keeps the value."""
        super().__init__()
        self._value = value

    def done(self) -> bool:
        """Returns True."""
        return True

    def wait(self) -> Any:
        """Returns the value."""
        return self._value

    value = wait

    def then(self, callback: Callable[..., Any]) -> Done:
        """Calls a function with this future at once; returns a future of what it returned."""
        return Done(callback(self))

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        """Calls a function with this future at once."""
        callback(self)


def returning_work(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a collective whose work has a future with the result, which the works of absent ranks lack.

    Args:
        original: A function of torch.distributed, whose first argument receives the result.
    """
    name = next(iter(inspect.signature(original).parameters))

    @wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        done = original(*args, **kwargs)
        if not isinstance(done, dist.Work) or isinstance(done, Work):
            return done
        return Work(args[0] if args else kwargs[name])

    return collective


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
        """Keeps what it consists of."""
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
