"""The order of requests to an allocator around the operators that make them."""

from __future__ import annotations

import numpy as np

from memprof.replay.allocator.events import ALLOCATE, FREE, Ids, Kinds
from memprof.trace.files.coding.coded import Coded
from memprof.trace.schema import NONE, Ints

#: Order of events around one operator: outputs are allocated, it runs, then storages that die with it are freed.
_BIRTH, _WORK, _WORKED, _DEATH = 0, 1, 2, 3


def order_requests(created: Ints, freed: Ints, workers: Ints) -> tuple[Kinds, Ids, Ints]:
    """Orders allocations, workspaces and frees; of one moment and kind, by row.

    Args:
        created: Operator that makes each storage, NONE if live before.
        freed: Operator after which each is freed, NONE if live at the end.
        workers: Operators with a workspace, ascending.

    Returns:
        The kind of each event (ALLOCATE or FREE), its subject (storages, then workspaces), and its operator. Storages
        live before have no event of allocation.
    """
    born = np.flatnonzero(created != NONE).astype(np.int32)
    died = np.flatnonzero(freed != NONE).astype(np.int32)
    works = np.arange(len(created), len(created) + len(workers), dtype=np.int32)
    about = np.concatenate([born, works, works, died])
    moment = np.concatenate([created[born], workers, workers, freed[died]])
    stage = np.repeat(
        np.array([_BIRTH, _WORK, _WORKED, _DEATH], dtype=np.int8), [len(born), len(works), len(works), len(died)]
    )
    order = np.argsort(moment * 4 + stage, kind="stable")
    kind: Kinds = np.where(stage[order] <= _WORK, np.int8(ALLOCATE), np.int8(FREE))
    return kind, about[order], moment[order]


def fullest_device(devices: Coded, allocated_bytes: Ints) -> str:
    """Returns the device with most bytes; ``cpu`` where no other device has any.

    Args:
        devices: The device of each storage.
        allocated_bytes: The bytes of each.
    """
    sums = {
        str(name): int(allocated_bytes[devices.codes == code].sum())
        for code, name in enumerate(devices.distinct)
        if name not in ("cpu", "", "meta")
    }
    return max(sorted(sums), key=lambda name: sums[name], default="cpu")
