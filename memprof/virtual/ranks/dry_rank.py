"""One rank of a dry run: replaces what torch.distributed would exchange with the other ranks."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memprof.virtual.ranks.messages import Messages
from memprof.virtual.ranks.replicas import dry_replicas, end_joins_at_once
from memprof.virtual.ranks.role import PipelineStages, Role

if TYPE_CHECKING:
    from memprof.virtual.ranks.role import Role


class DryRank:
    """This process as a rank of its job.

    Attributes:
        role: What it has done so far.
    """

    def __init__(
        self,
        spool: Path,
        refuse: Callable[[str], NoReturn],
        count_left_out: Callable[[str], None],
        *,
        is_given: bool = False,
        is_on_device: bool = False,
    ) -> None:
        """Changes nothing yet.

        Args:
            spool: The recording's spool folder, through which ranks exchange the values that sizes depend on.
            refuse: Ends the job with a message.
            count_left_out: Called for each action that is left out.
            is_given: Whether the parent starts each rank, with its number in the environment.
            is_on_device: Whether the job runs on a virtual GPU.
        """
        self.role = Role(spool)
        self._spool, self._is_on_device = spool, is_on_device
        self._messages = Messages(spool, self.role, refuse, is_given=is_given)
        self._refuse = refuse
        self._count_left_out = count_left_out
        self._is_given = is_given

    def install(self) -> None:
        """Replaces functions of torch.distributed; a job may create its process group before its first model."""
        if not torch.distributed.is_available():
            return
        from memprof.virtual.ranks.objects import Objects  # lazy: it needs a torch with distributed

        dry_replicas(self.role.note_reduction)
        end_joins_at_once()
        Objects(self._messages, self.role).install()
        allow_missing_ranks(self.role, self._join)
        if self._is_given:
            run_own_rank(self._refuse)
            PipelineStages(self.role, self._spool, is_on_device=self._is_on_device).install()

    def _join(self) -> None:
        """Replaces what only distributed jobs use, once the job has created its process group."""
        if self._is_given and multiprocessing.parent_process() is not None:
            self._refuse(
                "--ranks starts the ranks as torchrun does, but the job starts its own processes (not with "
                "torch.multiprocessing.spawn): leave out --ranks to dry-run all of them."
            )
        leave_out_checkpoints(self._count_left_out)
        leave_out_shape_propagation()
        leave_out_random_states()
        show_local_devices()


def leave_out_checkpoints(count_left_out: Callable[[str], None]) -> None:
    """Makes torch.distributed.checkpoint write and read nothing; tensors that a job loads into stay as they are."""
    # Lazy: only distributed jobs need it, and it takes a third of a second.
    from torch.distributed import checkpoint as distributed_checkpoint
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
    from torch.distributed.checkpoint.metadata import Metadata

    checkpoint: Any = distributed_checkpoint
    saver: Any = state_dict_saver
    loader: Any = state_dict_loader

    def save(*_: Any, **__: Any) -> Metadata:
        count_left_out("torch.distributed.checkpoint wrote nothing")
        return Metadata(state_dict_metadata={})

    def save_later(*_: Any, **__: Any) -> Future[Metadata]:
        done: Future[Metadata] = Future()
        done.set_result(save())
        return done

    def load(*_: Any, **__: Any) -> None:
        count_left_out("torch.distributed.checkpoint read nothing")

    saver._save_state_dict, loader._load_state_dict = save, load
    saver.async_save = checkpoint.async_save = save_later


def leave_out_shape_propagation() -> None:
    """Makes DTensor find shapes outside the dry run, as it does in a real run, where its tensors have no memory."""
    # Lazy: only distributed jobs need it, and it takes half a second.
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    propagator: Any = ShardingPropagator
    original = propagator._propagate_tensor_meta_non_cached

    @wraps(original)
    def propagate(this: Any, op_schema: Any) -> Any:
        changed: Any = op_schema.args_schema[0] if op_schema.args_schema else None
        if op_schema.is_inplace_op() and getattr(changed, "tensor_meta", None) is not None:
            return changed.tensor_meta  # drawing random numbers on a GPU needs a generator of its own
        with _disable_current_modes():
            return original(this, op_schema)

    propagator._propagate_tensor_meta_non_cached = propagate


def leave_out_random_states() -> None:
    """Makes DTensor draw random numbers as other tensors do.

    In a real run it keeps the ranks' states of the generator in step, with copies of 16 bytes to the device and back.
    """
    from torch.distributed.tensor import _dispatch, _random

    modules: tuple[Any, ...] = (_dispatch, _random)
    for module in modules:
        module.is_rng_supported_mesh = lambda _: False


def show_local_devices() -> None:
    """Makes tensors that wrap a rank's own part report its device, also where no mode answers for them."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor

    whole: Any = DTensor
    whole.device = property(lambda tensor: tensor._local_tensor.device)
    awaited: Any = AsyncCollectiveTensor
    awaited.device = property(lambda tensor: tensor.elem.device)


class _Ended:
    """Stands for the context of processes that have ended."""

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Returns True: all have ended."""
        return True

    def pids(self) -> list[int]:
        """Returns the number of this process."""
        return [os.getpid()]


def run_own_rank(refuse: Callable[[str], NoReturn]) -> None:
    """Makes ``torch.multiprocessing.spawn`` call its function here, with this rank's number on its node.

    Args:
        refuse: Ends the job with a message, if it starts another number of processes.
    """

    def start_processes(
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:
        on_node = int(os.environ["LOCAL_WORLD_SIZE"])
        if nprocs != on_node:
            refuse(
                f"the job starts {nprocs:,} processes on each node, but --ranks and --nodes give each {on_node:,}: use "
                f"--ranks {nprocs} on one node."
            )
        fn(int(os.environ["LOCAL_RANK"]), *args)
        return None if join else _Ended()

    processes: Any = torch.multiprocessing
    # The package's attribute of this name is the function.
    module: Any = import_module("torch.multiprocessing.spawn")
    processes.start_processes = module.start_processes = start_processes


_FAKE = "fake"


def allow_missing_ranks(role: Role, joined: Callable[[], None]) -> None:
    """Makes the job's process groups consist of this process alone, whatever their world size.

    Every collective completes immediately. Its tensors have their real sizes, and their values are never read.
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
