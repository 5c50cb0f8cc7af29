"""Passes Python objects, and small integer tensors sent point to point, between ranks of a dry run.

Sizes of tensors depend on them: stages of a pipeline exchange the shapes that they will send, ranks agree on a folder.
What is gathered from all ranks of a group (``all_gather_object``) is this rank's own object, once for each rank.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as _distributed

from memprof.virtual.ranks.messages import Messages
from memprof.virtual.ranks.role import Role
from memprof.virtual.ranks.works import COLLECTIVES, Sent, returning_work
from memprof.virtual.values.known import known, note

#: torch.distributed, whose names below are not all exported for type checkers.
dist: Any = _distributed
#: Integer tensors up to this size are sent with their values: shapes, counts and flags, on which sizes depend.
_MOST_ELEMENTS = 64
#: Names of the parameters for another rank: its global rank, and its place in the group.
_PEERS = (("dst", "src"), ("group_dst", "group_src"))


class Objects:
    """Replacements of the functions of torch.distributed that send objects and small tensors."""

    def __init__(self, messages: Messages, role: Role) -> None:
        """Changes nothing yet.

        Args:
            messages: Passes the objects.
            role: Receives the ranks with which tensors are exchanged.
        """
        self._messages = messages
        self._role = role
        self._is_inside = self._is_batch = False

    def install(self) -> None:
        """Replaces the functions of torch.distributed."""
        written: dict[str, Callable[..., Any]] = {
            "all_gather_object": self._all_gather,
            "gather_object": self._gather,
            "broadcast_object_list": self._broadcast,
            "scatter_object_list": self._scatter,
            "send_object_list": self._send_list,
            "recv_object_list": self._receive_list,
        }
        for name, function in written.items():
            self._put(name, _replacing(getattr(dist, name), function))
        for name in ("isend", "irecv", "recv"):  # send calls isend
            self._put(name, self._with_values(getattr(dist, name)))
        self._put("batch_isend_irecv", self._batched(dist.batch_isend_irecv))
        for name in COLLECTIVES:
            if hasattr(dist, name):  # torch 2.13 renamed two
                self._put(name, returning_work(getattr(dist, name)))

    @staticmethod
    def _put(name: str, function: Any) -> None:
        setattr(dist, name, function)
        setattr(dist.distributed_c10d, name, function)

    @staticmethod
    def _all_gather(given: SimpleNamespace) -> None:
        given.object_list[:] = [copy.deepcopy(given.obj) for _ in given.object_list]

    def _gather(self, given: SimpleNamespace) -> None:
        if given.object_gather_list is not None and self._role.rank == _peer(given):
            given.object_gather_list[:] = [copy.deepcopy(given.obj) for _ in given.object_gather_list]

    def _broadcast(self, given: SimpleNamespace) -> None:
        given.object_list[:] = self._from_one("broadcast", given.object_list, _peer(given), given.group)

    def _scatter(self, given: SimpleNamespace) -> None:
        found = self._from_one("scatter", given.scatter_object_input_list, _peer(given), given.group)
        given.scatter_object_output_list[0] = found[dist.get_rank(given.group)]

    def _from_one(self, kind: str, value: Any, source: int, group: Any) -> Any:
        members = dist.get_process_group_ranks(group)
        if source == self._role.rank:
            self._messages.send(kind, members, source, -1, value)
            return value
        return self._messages.receive(kind, members, source, -1)

    def _send_list(self, given: SimpleNamespace) -> None:
        target = _peer(given)
        self._role.note_peer(target)
        members = dist.get_process_group_ranks(given.group)
        self._messages.send("object", members, self._role.rank, target, given.object_list)

    def _receive_list(self, given: SimpleNamespace) -> int:
        source = _peer(given)
        self._role.note_peer(source)
        members = dist.get_process_group_ranks(given.group)
        given.object_list[:] = self._messages.receive("object", members, source, self._role.rank)
        return source

    def _with_values(self, original: Any) -> Any:
        """Returns a function that sends or receives a tensor, with its values if these are a few integers.

        ``irecv`` alone receives none: its sender may wait for this rank first.
        """
        form = inspect.signature(original)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:  # torch calls the function again inside a function mode, and irecv inside recv
                return original(*args, **kwargs)
            given = form.bind(*args, **kwargs).arguments
            self._is_inside = True
            try:
                done = original(*args, **kwargs)
            finally:
                self._is_inside = False
            peer, place = (given.get(first, given.get(second)) for first, second in _PEERS)
            if peer is None and place is None:
                return done  # from any rank
            tensor, group = given["tensor"], given.get("group")
            other = _rank(group, peer, place)
            self._role.note_peer(other)
            if tensor.is_cuda:
                self._role.note_transfer(other, group, is_batched=self._is_batch)
            if "dst" in form.parameters:
                self._send_values(tensor, other, group)
                return Sent(tensor) if isinstance(done, dist.Work) else done
            if original.__name__ == "recv":
                self._receive_values(tensor, other, group)
            return done

        return call

    def _batched(self, original: Any) -> Any:
        @wraps(original)
        def batch(p2p_op_list: Sequence[Any]) -> Any:
            self._is_batch = True
            try:
                done = original(p2p_op_list)
            finally:
                self._is_batch = False
            for one in p2p_op_list:
                if one.op is dist.irecv:
                    self._receive_values(one.tensor, one.peer, one.group)
            return done

        return batch

    def _send_values(self, tensor: torch.Tensor, target: int, group: Any) -> None:
        if _carries_values(tensor):
            values = known(tensor)
            sent = None if values is None else values.tolist()
            self._messages.send("values", dist.get_process_group_ranks(group), self._role.rank, target, sent)

    def _receive_values(self, tensor: torch.Tensor, source: int, group: Any) -> None:
        if not _carries_values(tensor):
            return
        found = self._messages.receive("values", dist.get_process_group_ranks(group), source, self._role.rank)
        if found is not None:
            with torch._C._DisableTorchDispatch():
                note(tensor, torch.tensor(found, dtype=tensor.dtype))


def _replacing(original: Any, function: Callable[[SimpleNamespace], Any]) -> Any:
    """Returns what stands for a function of torch's: it gets the arguments by name, where this rank is in the group."""
    form = inspect.signature(original)

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        given = form.bind(*args, **kwargs)
        given.apply_defaults()
        named = SimpleNamespace(**given.arguments)
        return None if named.group is dist.GroupMember.NON_GROUP_MEMBER else function(named)

    return replacement


def _carries_values(tensor: torch.Tensor) -> bool:
    is_whole = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
    return is_whole and tensor.numel() <= _MOST_ELEMENTS


def _peer(given: SimpleNamespace) -> int:
    """Returns the global rank of the one that sends to others or receives from them."""
    return next(
        _rank(given.group, getattr(given, first), getattr(given, second, None))
        for first, second in zip(*_PEERS, strict=True)
        if hasattr(given, first)
    )


def _rank(group: Any, rank: int | None, group_rank: int | None) -> int:
    """Returns a global rank, given as such or by its place in a group."""
    if group_rank is not None:
        return int(dist.get_global_rank(group or dist.group.WORLD, group_rank))
    return 0 if rank is None else rank
