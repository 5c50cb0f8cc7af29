"""One rank of a dry run: replaces what torch.distributed would exchange with the other ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

import torch

from memprof.recorder.dry.ranks.absent_ranks import allow_missing_ranks
from memprof.recorder.dry.ranks.messages import Messages
from memprof.recorder.dry.ranks.pipelines import PipelineStages
from memprof.recorder.dry.ranks.replicas import dry_replicas, end_joins_at_once
from memprof.recorder.dry.ranks.role import Role
from memprof.recorder.dry.ranks.sharding import (
    leave_out_random_states,
    leave_out_shape_propagation,
    show_local_devices,
)
from memprof.recorder.dry.ranks.spawning import run_own_rank


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
        from memprof.recorder.dry.ranks.objects import Objects  # lazy: it needs a torch with distributed

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
    """Makes torch.distributed.checkpoint write and read nothing; tensors that a job loads into stay as they are.

    Args:
        count_left_out: Called for each checkpoint.
    """
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
