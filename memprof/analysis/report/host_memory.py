"""Main memory of the job's processes: the trainer, its data loader workers, other children."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import NONE, HostMemory

#: The display order of roles; any other comes last.
_ROLES = ("trainer", "worker", "child")


@dataclass(frozen=True)
class HostProcess:
    """Peak main memory of one process of the job.

    Attributes:
        role: ``trainer``, ``worker`` or ``child``.
        pid: Its process id.
        maximum_rss_bytes: Peak resident memory, including pages shared with other processes.
        maximum_private_bytes: Peak private resident memory; None where the system does not report it.
    """

    role: str
    pid: int
    maximum_rss_bytes: int
    maximum_private_bytes: int | None


def summarise_host_memory(samples: HostMemory) -> tuple[HostProcess, ...]:
    """Returns each process's maxima over the whole job: the trainer first, then the workers, largest first.

    Args:
        samples: Samples of every process.
    """
    processes = []
    for pid in np.unique(samples.pid).tolist():
        own = samples.take(samples.pid == pid)
        private = int(own.private_bytes.max())
        processes.append(
            HostProcess(
                role=str(own.role[-1]),  # a child may be identified as a worker only after its first samples
                pid=pid,
                maximum_rss_bytes=int(own.rss_bytes.max()),
                maximum_private_bytes=None if private == NONE else private,
            )
        )
    return tuple(sorted(processes, key=_rank))


def _rank(process: HostProcess) -> tuple[int, int, int]:
    role = _ROLES.index(process.role) if process.role in _ROLES else len(_ROLES)
    return (role, -process.maximum_rss_bytes, process.pid)
