"""Makes a dry run one rank of several: the others do not exist, and nothing is sent to them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memprof.recorder.dry.ranks.role import Role

_FAKE = "fake"


def allow_missing_ranks(role: Role, joined: Callable[[], None]) -> None:
    """Makes the job's process groups consist of this process alone, whatever their world size.

    Every collective completes immediately. Its tensors have their real sizes, and their values are never read.

    Args:
        role: Receives the groups.
        joined: Called when the job has created its process group.
    """
    groups: Any = torch.distributed.distributed_c10d
    original, create = groups.init_process_group, groups._new_group_with_tag

    @wraps(original)
    def init(backend: Any = None, *_: Any, rank: int = -1, world_size: int = -1, **__: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # lazy: most jobs create no group

        rank = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
        world_size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        original(_FAKE, rank=rank, world_size=world_size, store=FakeStore())
        role.join(rank, world_size)
        joined()

    @wraps(create)
    def new_group(
        ranks: Sequence[int] | None = None,
        timeout: Any = None,
        backend: Any = None,
        options: Any = None,
        *rest: Any,
        **kwargs: Any,
    ) -> Any:
        del backend, options
        role.note_group(range(role.world_size) if ranks is None else ranks)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("backend_options", "device_id")}
        return create(ranks, timeout, _FAKE, None, *rest, **kwargs)

    def split_group(
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: Any = None,
    ) -> Any:
        """Creates the parts of a group, whose ranks are places in it; returns this rank's own, or None."""
        if not split_ranks:
            raise ValueError("split_ranks cannot be None or empty")
        members = groups.get_process_group_ranks(parent_pg or groups.GroupMember.WORLD)
        own = None
        for places in split_ranks:
            ranks = sorted(members[place] for place in places)
            made = groups.new_group(ranks, timeout=timeout, group_desc=group_desc)
            own = made if role.rank in ranks else own
        return own

    groups.init_process_group, groups._new_group_with_tag, groups.split_group = init, new_group, split_group
    distributed: Any = torch.distributed
    # A mesh creates the group where the job has not.
    for module in (distributed, distributed.device_mesh):
        module.init_process_group, module.split_group = init, split_group
