"""Averages gradients over ranks, in buckets that are sent while backward runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from memprof.policies.runtime.replaced import has_values
from memprof.policies.shard.division import fill_buckets


@dataclass(eq=False)
class _Bucket:
    """Gradients that are sent together.

    Attributes:
        members: Indices of its parameters.
        offsets: Offset of each one's gradient, in elements.
        size: Total number of elements.
        buffer: Their gradients, while any of them exists.
        missing: Members whose gradient has not arrived in this backward.
    """

    members: list[int]
    offsets: list[int]
    size: int
    buffer: torch.Tensor | None = None
    missing: set[int] = field(default_factory=set)


class Averaging:
    """Averages the gradients of all ranks.

    A gradient is copied into its bucket when it is complete, and is a view of it from then on. A bucket is sent when
    all its gradients have arrived, in the same order on all ranks. A parameter without a gradient on every rank has
    none afterwards; one with a gradient on only some ranks counts as zero on the others.

    torch's DistributedDataParallel does the same from outside the model; a script that calls the model itself would
    bypass it, and it fails where a parameter is unused.

    Source: Li et al. 2020, "PyTorch Distributed: experiences on accelerating data parallel training", for buckets in
    the order in which gradients arrive.
    """

    def __init__(self, model: torch.nn.Module, bucket_mib: int) -> None:
        """Collects the parameters; averaging starts with `install`."""
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._number = {id(each): number for number, each in enumerate(self._parameters)}
        self._bucket_mib = bucket_mib
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, tuple[_Bucket, int]] = {}
        self._arrived: list[int] = []
        self._is_under_way = False
        self._sent = 0
        self._work: list[Any] = []
        self._handles: list[Any] = []

    def install(self) -> None:
        """Starts averaging."""
        parameters: list[Any] = self._parameters  # torch's method is not annotated
        self._handles = [each.register_post_accumulate_grad_hook(self._take) for each in parameters]

    def remove(self) -> None:
        """Stops averaging."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _take(self, parameter: torch.Tensor) -> None:
        """Copies a complete gradient into its bucket, and sends full buckets."""
        if not self._is_under_way:
            self._begin()
        number = self._number[id(parameter)]
        self._arrived.append(number)
        if self._buckets:
            bucket, _ = self._bucket_of[number]
            self._move(number)
            bucket.missing.discard(number)
            while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
                self._send(self._buckets[self._sent])
                self._sent += 1

    def _begin(self) -> None:
        self._is_under_way = True
        self._arrived.clear()
        self._sent = 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.members)
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """Sends the remaining buckets when backward ends, and waits for all."""
        self._is_under_way = False
        if not self._buckets:
            self._make_buckets()
            for bucket in self._buckets:
                bucket.missing = set(bucket.members)
        for bucket in self._buckets[self._sent :]:
            for number in bucket.members:
                if number in bucket.missing:
                    self._move(number)
            self._send(bucket)
        for work in self._work:
            work.wait()
        self._work.clear()
        # Last on all ranks, because collectives must run in the same order.
        is_used = torch.zeros(len(self._parameters), dtype=torch.int32)
        is_used[self._arrived] = 1
        is_used = is_used.to(self._parameters[0].device)
        dist.all_reduce(is_used)
        used = torch.nonzero(is_used).flatten()
        # In a dry run no other rank has gradients.
        for number in used.tolist() if has_values(used) else sorted(set(self._arrived)):
            parameter = self._parameters[number]
            if parameter.grad is None:  # another rank had one
                bucket, offset = self._bucket_of[number]
                assert bucket.buffer is not None
                parameter.grad = _view(bucket.buffer, parameter, offset)
        for bucket in self._buckets:
            bucket.buffer = None  # the gradients hold it

    def _make_buckets(self) -> None:
        """Groups parameters in the order in which rank 0's gradients arrived, those without a gradient last."""
        came = set(self._arrived)
        rest = [number for number in reversed(range(len(self._parameters))) if number not in came]
        own_order = [*self._arrived, *rest]
        order = torch.tensor(own_order, device=self._parameters[0].device)
        dist.broadcast(order, 0)
        numbers = order.tolist() if has_values(order) else own_order
        kinds = list(dict.fromkeys((each.dtype, each.device) for each in self._parameters))
        for kind in kinds:
            own = [n for n in numbers if (self._parameters[n].dtype, self._parameters[n].device) == kind]
            for members in fill_buckets(own, [self._parameters[n].nbytes for n in own], self._bucket_mib):
                offsets, size = [], 0
                for number in members:
                    offsets.append(size)
                    size += self._parameters[number].numel()
                self._buckets.append(_Bucket(members, offsets, size))
        # The same order on all ranks: that of the last member, which completes a bucket.
        place = {number: place for place, number in enumerate(numbers)}
        self._buckets.sort(key=lambda bucket: max(place[number] for number in bucket.members))
        self._bucket_of = {
            number: (bucket, offset)
            for bucket in self._buckets
            for number, offset in zip(bucket.members, bucket.offsets, strict=True)
        }

    def _move(self, number: int) -> None:
        """Makes a parameter's gradient a view of its bucket; without a gradient, zeroes its place there."""
        parameter = self._parameters[number]
        bucket, offset = self._bucket_of[number]
        if bucket.buffer is None:
            bucket.buffer = self._buffer_of(bucket)
        view = _view(bucket.buffer, parameter, offset)
        gradient = parameter.grad
        if gradient is None:
            view.zero_()
        elif gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = view

    def _buffer_of(self, bucket: _Bucket) -> torch.Tensor:
        """Returns the buffer that already holds gradients of the bucket, or a new one."""
        first = self._parameters[bucket.members[0]]
        for number, offset in zip(bucket.members, bucket.offsets, strict=True):
            gradient = self._parameters[number].grad
            if gradient is not None and gradient.untyped_storage().nbytes() == bucket.size * gradient.element_size():
                flat = torch.as_strided(gradient.detach(), (bucket.size,), (1,), 0)
                if gradient.storage_offset() == offset:
                    return flat
        return torch.empty(bucket.size, dtype=first.dtype, device=first.device)

    def _send(self, bucket: _Bucket) -> None:
        assert bucket.buffer is not None
        bucket.buffer.div_(dist.get_world_size())
        self._work.append(dist.all_reduce(bucket.buffer, async_op=True))


def _view(buffer: torch.Tensor, parameter: torch.Tensor, offset: int) -> torch.Tensor:
    """Returns a parameter's view of a buffer, in the parameter's own memory format."""
    lies = parameter.stride()
    order = sorted(range(len(lies)), key=lambda dim: lies[dim], reverse=True)
    strides, step = [0] * len(lies), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= parameter.size(dim)
    return buffer.as_strided(parameter.shape, strides, offset)
