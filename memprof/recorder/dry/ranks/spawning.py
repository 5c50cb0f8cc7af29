"""Runs what a job would start in processes of its own, one for each rank of a node, in this rank's process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

import torch


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
