"""Leaves out distributed checkpoints: a dry run neither writes nor reads them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


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
