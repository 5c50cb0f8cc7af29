"""Dry-runs DistributedDataParallel, which copies gradients into buckets; nothing is sent.

torch's reducer writes to the memory of tensors, which those of a dry run have none of. A reducer written in operators
stands in for it; all else of DistributedDataParallel runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as _distributed
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from memprof.virtual.ranks.works import Bucket, Done, GradBucket, builtin_hook

#: torch.distributed, whose names below are not all exported for type checkers.
dist: Any = _distributed
#: Buckets of parameters and buffers that torch's broadcast has under way at a time.
_IN_FLIGHT = 2


def dry_replicas(note_reduction: Callable[[Any], None]) -> None:
    """Lets DistributedDataParallel run on one rank, alone or of several.

    Args:
        note_reduction: Called with the process group of each wrapper on the device, which reduces its gradients there.
    """
    dist.Reducer = partial(Reducer, note_reduction)
    dist.Logger = _Logger
    dist._broadcast_coalesced = _flatten_in_turn
    dist._verify_params_across_processes = lambda *_: None
    wrapper: Any = DistributedDataParallel
    wrapper._check_comm_hook = lambda *_: None  # it looks for the GPUs and the NCCL of this machine
    dist._register_comm_hook = lambda reducer, state, hook: reducer.register_hook(state, hook)
    dist._register_builtin_comm_hook = lambda reducer, kind: reducer.register_hook(None, builtin_hook(kind))


class Reducer:
    """Buckets of gradients, as torch's reducer allocates and fills them.

    Source: torch/csrc/distributed/c10d/reducer.cpp. Buffers are allocated with the wrapper and once more, in the order
    in which gradients arrived, before the second forward. A complete gradient is copied into its bucket, and back when
    backward ends; with ``gradient_as_bucket_view`` it is a view of the bucket from then on. A communication hook is
    called with each bucket, in their order, as soon as it is complete; gradients are copied from what it returned.
    """

    def __init__(
        self,
        note_reduction: Callable[[Any], None],
        parameters: Sequence[torch.Tensor],
        buckets: Sequence[Sequence[int]],
        size_limits: Sequence[int],
        group: object,
        expect_sparse: Sequence[bool],
        bucket_bytes: int,
        find_unused: bool,
        as_views: bool,
        names: object,
        first_bucket_bytes: int,
        *_: object,
    ) -> None:
        """Allocates the buckets; arguments are those of torch's, after that of `dry_replicas`."""
        self._parameters: list[Any] = list(parameters)  # torch's methods for hooks are not annotated
        if any(parameter.is_cuda for parameter in self._parameters):
            note_reduction(group)
        self._limits = [first_bucket_bytes, bucket_bytes]
        self._as_views = as_views
        self._can_rebuild = not find_unused
        self._is_expected = self._is_under_way = False
        self._arrived: list[int] = []
        self._views: dict[int, torch.Tensor] = {}
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._launched = 0
        self._hook: Callable[..., Any] | None = None
        self._state: Any = None
        self._allocate(buckets)
        if find_unused:  # which parameters were used, on the processor and on the device
            count, device = len(self._parameters), self._parameters[0].device
            self._used = [torch.zeros(count, dtype=torch.int32), torch.empty(count, dtype=torch.int32, device=device)]
        self._handles = [
            one.register_post_accumulate_grad_hook(lambda parameter, number=number: self._take(number, parameter))
            for number, one in enumerate(self._parameters)
        ]

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Returns a method for all that concerns other ranks and logs."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None

    def register_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Calls a communication hook with each bucket that is complete.

        Args:
            state: Its first argument.
            hook: Returns a future of a tensor of the bucket's gradients, or of a list with it.
        """
        self._state, self._hook = state, hook

    def _run_allreduce_hook(self, bucket: GradBucket) -> Done:
        return Done([bucket.buffer()])

    def prepare_for_backward(self, outputs: object) -> None:
        """Expects gradients in the next backward: those of ``no_sync`` are left alone."""
        self._is_expected = True

    def _rebuild_buckets(self) -> bool:
        """Allocates the buckets anew in the order of arrival, once."""
        if not self._can_rebuild or len(self._arrived) < len(self._parameters):
            return False
        self._can_rebuild = False
        for kept in (self._views, self._buckets, self._bucket_of):  # buffers are freed before new ones are allocated
            kept.clear()
        members = [self._parameters[number] for number in self._arrived]
        found, _ = dist._compute_bucket_assignment_by_size(members, self._limits)
        self._allocate([[self._arrived[place] for place in bucket] for bucket in found])
        return True

    def _remove_autograd_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _allocate(self, buckets: Sequence[Sequence[int]]) -> None:
        for numbers in buckets:
            members = [self._parameters[number] for number in numbers]
            buffer = torch.empty(sum(one.numel() for one in members), dtype=members[0].dtype, device=members[0].device)
            bucket = Bucket(list(numbers), buffer)
            self._buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(numbers, bucket)
            self._views |= self._divided(bucket, buffer)

    def _divided(self, bucket: Bucket, buffer: torch.Tensor) -> dict[int, torch.Tensor]:
        """Returns views of a bucket's buffer, or of a tensor like it, in the shape of each parameter, by its number."""
        views: dict[int, torch.Tensor] = {}
        offset = 0
        for number in bucket.members:
            one = self._parameters[number]
            flat = buffer[offset : offset + one.numel()]
            is_dense = one.is_contiguous() or one.is_contiguous(memory_format=torch.channels_last)
            views[number] = flat.as_strided(one.shape, one.stride()) if is_dense else flat.view(one.shape)
            offset += one.numel()
        return views

    @torch.no_grad()
    def _take(self, number: int, parameter: torch.Tensor) -> None:
        if not self._is_expected:
            return
        if not self._is_under_way:
            self._is_under_way = True
            self._launched = 0
            for bucket in self._buckets:
                bucket.missing, bucket.result = len(bucket.members), None
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._finish)
        if self._can_rebuild and number not in self._arrived:
            self._arrived.append(number)
        gradient, view = parameter.grad, self._views[number]
        assert gradient is not None
        if gradient.untyped_storage() is not view.untyped_storage():
            view.copy_(gradient)
            if self._as_views:
                parameter.grad = view
        self._bucket_of[number].missing -= 1
        self._launch(only_complete=True)

    def _launch(self, *, only_complete: bool) -> None:
        """Calls the hook with the next buckets in order, up to one that is not complete unless all are wanted."""
        if self._hook is None:
            return
        while self._launched < len(self._buckets):
            place = self._launched
            bucket = self._buckets[place]
            if only_complete and bucket.missing > 0:
                return
            self._launched += 1
            members = [self._parameters[number] for number in bucket.members]
            views = [self._views[number] for number in bucket.members]
            is_last = self._launched == len(self._buckets)
            given = GradBucket(place, bucket.buffer, views, members, is_last=is_last)
            found = self._hook(self._state, given).wait()
            bucket.result = found if isinstance(found, torch.Tensor) else found[0]

    @torch.no_grad()
    def _finish(self) -> None:
        self._launch(only_complete=False)
        self._is_under_way = self._is_expected = False
        for bucket in self._buckets:
            result = bucket.buffer if bucket.result is None else bucket.result
            if self._as_views and result.untyped_storage() is bucket.buffer.untyped_storage():
                continue
            for number, view in self._divided(bucket, result).items():
                parameter = self._parameters[number]
                if parameter.grad is not None:
                    parameter.grad.copy_(view)


class _Logger:
    """Logs nothing, in place of the logger of a reducer."""

    def __init__(self, reducer: Reducer) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Returns a method for whatever is logged."""
        return lambda *_, **__: None

    def _get_ddp_logging_data(self) -> SimpleNamespace:
        """Returns what was logged, by name: nothing. Lightning reads it when training ends."""
        return SimpleNamespace(strs_map={}, ints_map={})


@torch.no_grad()
def _flatten_in_turn(group: object, tensors: Sequence[torch.Tensor], buffer_bytes: int, source: int = 0) -> None:
    """Allocates what a broadcast copies tensors to and back from: flat buffers, two at a time."""
    found, _ = dist._compute_bucket_assignment_by_size(list(tensors), [buffer_bytes])
    under_way: list[torch.Tensor] = []
    for bucket in found:
        under_way.append(torch.cat([tensors[place].reshape(-1) for place in bucket]))
        del under_way[:-_IN_FLIGHT]


def end_joins_at_once() -> None:
    """Ends the context manager ``join`` without other ranks: a rank that has no more inputs waits for none.

    In a real run it repeats the others' collectives on zeros meanwhile, which take less memory than training.
    """
    joining: Any = Join
    notify = joining.notify_join_context
    joining._get_num_nonjoined_procs = lambda _: 0

    def notify_alone(joinable: Any) -> Any:
        config = joinable._join_config
        joinable._join_config = config._replace(throw_on_early_termination=False)  # it would read others' values
        try:
            return notify(joinable)
        finally:
            joinable._join_config = config

    joining.notify_join_context = staticmethod(notify_alone)
