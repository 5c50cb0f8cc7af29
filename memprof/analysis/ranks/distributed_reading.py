"""Reads the ranks of a recording side by side through Dask, on this machine's cores or on a cluster of others.

For queries that the summaries in a recording cannot answer (``analysis.ranks`` needs none of this), and for recordings
whose tables exceed one machine's memory. Every task opens the recording itself and holds one rank at a time, so all
workers must be able to read it: from a shared file system, or an address such as ``s3://bucket/run.memprof``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from memprof.errors import UsageError
from memprof.replay.live import live_bytes
from memprof.trace.schema import Table
from memprof.trace.store import Trace

if TYPE_CHECKING:
    import dask.dataframe
    import pandas as pd

T = TypeVar("T")

#: Input of one task: for each file, the ranks as numbered in the trace and in the file.
_Part = dict[str, list[tuple[int, int]]]

#: Ranks per task: enough to amortize listing the recording's entries.
PER_TASK = 32


def map_ranks(
    path: str | Path,
    function: Callable[[Trace], T],
    *,
    ranks: Sequence[int] | None = None,
    scheduler: str | None = None,
    per_task: int = PER_TASK,
) -> dict[int, T]:
    """Applies a function to every rank of a recording, in parallel.

    Args:
        path: The recording, a folder of them, or an address.
        function: Applied to each rank: takes its trace, returns the result to keep.
        ranks: The ranks; all where left out.
        scheduler: A Dask scheduler: ``threads``, ``processes``, ``synchronous``. If omitted, the connected client of
            ``dask.distributed``, or else threads.
        per_task: Ranks per task.

    Returns:
        What the function returned, by rank.

    Raises:
        BadInputError: The recording, or a table of it, cannot be read.
        UsageError: Dask is not installed, or a rank does not exist.
    """
    delayed, compute = _dask()
    tasks = [delayed(_read_ranks)(part, function) for part in _parts(Trace.open(path), ranks, per_task)]
    options = {} if scheduler is None else {"scheduler": scheduler}
    found = {rank: result for part in compute(*tasks, **options) for rank, result in part}
    return {rank: found[rank] for rank in sorted(found)}


def read_frame(
    path: str | Path, kind: type[Table], columns: Sequence[str] = (), *, per_task: int = PER_TASK
) -> dask.dataframe.DataFrame:
    """Returns a table of all ranks as a lazy Dask dataframe, with the rank as its first column.

    Args:
        path: The recording, a folder of them, or an address.
        kind: The table.
        columns: Its columns; all where left out.
        per_task: Ranks per partition.

    Raises:
        BadInputError: The recording cannot be read.
        UsageError: Dask is not installed.
    """
    _dask()
    import dask.dataframe

    names = list(columns) or [column.name for column in kind.columns()]
    parts = _parts(Trace.open(path), None, per_task)
    return dask.dataframe.from_map(  # type: ignore[no-any-return, attr-defined, no-untyped-call, unused-ignore]
        _read_frames, parts, kind=kind, names=names, meta=_frame(kind.empty(), names, NO_RANK)
    )


def peak_curve(trace: Trace, stretches: int) -> list[int]:
    """Returns the peak live bytes in each of equally long stretches of a rank's fullest step.

    Args:
        trace: The rank.
        stretches: Number of stretches; a step with fewer operators has one for each.
    """
    highest = live_bytes(trace.fullest_step()).during
    count = min(stretches, len(highest))
    starts = (np.arange(count) * len(highest)) // max(count, 1)
    return np.maximum.reduceat(highest, starts).tolist() if count else []


#: The rank column of a frame without rows.
NO_RANK = -1


def _parts(trace: Trace, ranks: Sequence[int] | None, per_task: int) -> list[_Part]:
    """Assigns ranks to tasks, grouped by file so that a task lists the entries of few files.

    Raises:
        UsageError: A rank does not exist.
    """
    chosen = trace.ranks if ranks is None else tuple(trace.fresh(rank).rank for rank in ranks)
    placed = sorted((str(path), number, rank) for rank in chosen for path, number in (trace.origin(rank),))
    parts = []
    for first in range(0, len(placed), per_task):
        part: _Part = {}
        for path, number, rank in placed[first : first + per_task]:
            part.setdefault(path, []).append((rank, number))
        parts.append(part)
    return parts


def _traces(part: _Part) -> Iterator[tuple[int, Trace]]:
    for path, ranks in part.items():
        trace = Trace.open(path)
        for rank, number in ranks:
            # A trace caches its tables: each rank gets a fresh one, released before the next.
            yield rank, trace.fresh(number)


def _read_ranks(part: _Part, function: Callable[[Trace], T]) -> list[tuple[int, T]]:
    return [(rank, function(trace)) for rank, trace in _traces(part)]


def _read_frames(part: _Part, kind: type[Table], names: list[str]) -> pd.DataFrame:
    import pandas as pd

    return pd.concat([_frame(trace.table(kind), names, rank) for rank, trace in _traces(part)], ignore_index=True)


def _frame(table: Table, names: list[str], rank: int) -> pd.DataFrame:
    import pandas as pd

    columns = {name: getattr(table, name) for name in names}
    frame = pd.DataFrame({"rank": np.full(len(table), rank, dtype=np.int64), **columns})
    texts = [column.name for column in table.columns() if column.kind == "text" and column.name in columns]
    return frame.astype(dict.fromkeys(texts, "string"))


def _dask() -> tuple[Any, Any]:
    try:
        from dask.base import compute
        from dask.delayed import delayed
    except ImportError as error:
        raise UsageError(
            "reading many ranks side by side needs Dask: pip install 'torch-memprof[distributed]'"
        ) from error
    return delayed, compute
