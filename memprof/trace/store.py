"""A trace, opened: tables that are read when they are asked for, and the steps in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np

from memprof.errors import BadInputError, UsageError
from memprof.trace.archive import unreadable
from memprof.trace.container import FileRank, columns_of, read_container, write_trace
from memprof.trace.cut import cut_step, cuttable_steps
from memprof.trace.manifest import Manifest, number_ranks
from memprof.trace.pack import is_spool_folder, read_spool_folder
from memprof.trace.schema import Ints, Ops, Steps, Table
from memprof.trace.step import Step

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Trace", "write_trace"]

T = TypeVar("T", bound=Table)


class RecordedRank(Protocol):
    """One process of a trace, in a file or in memory."""

    @property
    def manifest(self) -> Manifest:
        """What the process's recording says about itself."""
        ...

    def read(self, kind: type[T], /) -> T:
        """Reads one table; one that is not there has no rows."""
        ...

    def read_columns(self, kind: type[Table], names: Sequence[str], /) -> dict[str, Any]:
        """Reads some columns of one table; texts are coded."""
        ...


@dataclass(frozen=True)
class MemoryRank:
    """One process whose tables are in memory already."""

    manifest: Manifest
    tables: Mapping[type[Table], Table]

    def read(self, kind: type[T], /) -> T:
        """Returns the table; one that is not there has no rows."""
        return cast(T, self.tables[kind]) if kind in self.tables else kind.empty()

    def read_columns(self, kind: type[Table], names: Sequence[str]) -> dict[str, Any]:
        """Returns some columns of a table; texts are coded."""
        return columns_of(self.read(kind), names)


class Trace:
    """One rank of a recording, and the way to its others.

    Attributes:
        path: What was opened.
        rank: The rank whose tables these are.
        ranks: Every rank of the recording, lowest first.
        manifest: What the rank's recording says about itself.
    """

    def __init__(self, path: Path, processes: Mapping[int, RecordedRank], rank: int | None = None) -> None:
        """Takes the processes by rank; ``rank`` is the lowest where left out.

        Raises:
            UsageError: There is no such rank.
        """
        self._processes = processes
        self._tables: dict[type[Table], Table] = {}
        self.path = path
        self.ranks = tuple(sorted(processes))
        self.rank = self.ranks[0] if rank is None else rank
        if self.rank not in processes:
            raise UsageError(f"{path} has no rank {rank}; it has {_listed(self.ranks)}.")
        self.manifest = processes[self.rank].manifest

    @staticmethod
    def open(path: str | Path, rank: int | None = None) -> Trace:
        """Opens a .memprof file, a folder of them (one for each rank), or the spool folder of a recording.

        Tables are read when they are asked for. Nothing in the file is ever run.

        Args:
            path: What to open.
            rank: The rank to look at, the lowest where left out.

        Raises:
            BadInputError: There is nothing there, or it is empty, cut short, damaged, foreign or of a newer memprof.
            UsageError: There is no such rank.
        """
        path = Path(path)
        if not _is_folder(path):
            return Trace(path, {process.manifest.rank: process for process in read_container(path)}, rank)
        if is_spool_folder(path):
            return Trace.of(read_spool_folder(path), path, rank)
        files = sorted(path.glob("*.memprof"))
        processes = [process for file in files if file.is_file() for process in read_container(file)]
        if not processes:
            raise BadInputError(f"The folder {path} holds no .memprof file, nor the spool of a recording.")
        return Trace(path, _by_rank(processes), rank)

    @staticmethod
    def of(
        ranks: Sequence[tuple[Manifest, Mapping[type[Table], Table]]], path: str | Path, rank: int | None = None
    ) -> Trace:
        """Makes a trace of tables in memory, such as those of a spool folder.

        Args:
            ranks: Manifest and tables of each rank; no two the same rank.
            path: What the trace is called.
            rank: The rank to look at, the lowest where left out.
        """
        return Trace(Path(path), {manifest.rank: MemoryRank(manifest, tables) for manifest, tables in ranks}, rank)

    def rank_trace(self, rank: int) -> Trace:
        """Returns the trace of another rank of the same recording.

        Raises:
            UsageError: There is no such rank.
        """
        return self if rank == self.rank else Trace(self.path, self._processes, rank)

    def table(self, kind: type[T], /) -> T:
        """Returns a table, read from the file the first time.

        Raises:
            BadInputError: The table is damaged.
        """
        if kind not in self._tables:
            self._tables[kind] = self._processes[self.rank].read(kind)
        return cast(T, self._tables[kind])

    def columns(self, kind: type[Table], *names: str) -> dict[str, Any]:
        """Reads some columns of a table, and keeps none: for recordings whose tables are too large to hold whole.

        Args:
            kind: The table.
            names: Its columns.

        Returns:
            The columns by name: numbers as numpy arrays, texts as ``trace.columns.Coded``.

        Raises:
            BadInputError: The table is damaged.
        """
        return self._processes[self.rank].read_columns(kind, names)

    def frame(self, kind: type[Table]) -> pd.DataFrame:
        """Returns a table as a pandas DataFrame, with the same column names and values."""
        import pandas as pd  # slow to import, and nothing else here needs it

        table = self.table(kind)
        return pd.DataFrame({column.name: getattr(table, column.name) for column in kind.columns()})

    @property
    def recorded_steps(self) -> tuple[int, ...]:
        """Numbers of the recorded steps that have operators; of the warm-up's where there are none."""
        steps = self.table(Steps)
        for kind in ("recorded", "warm_up"):
            numbers = steps.step[cuttable_steps(steps) & (steps.kind == kind)]
            if len(numbers):
                return tuple(int(number) for number in np.sort(numbers))
        return ()

    def step(self, number: int) -> Step:
        """Cuts out a step.

        Args:
            number: The step's number in the job, of a recorded or warm-up step.

        Raises:
            UsageError: The trace has no operators of it; the sentence lists the steps it has.
        """
        return cut_step(self, number)

    def steady_step(self) -> Step:
        """Cuts out the step that stands for all: the last one that runs the operators most recorded steps run.

        Complete steps go before those the recording ends in, and recorded ones before the warm-up.

        Raises:
            BadInputError: The trace has no operators at all.
        """
        steps = self.table(Steps)
        for kind in ("recorded", "warm_up"):
            for is_complete in (True, False):
                rows = np.flatnonzero(cuttable_steps(steps) & (steps.kind == kind) & (steps.is_complete == is_complete))
                if len(rows):
                    return self.step(int(steps.step[_last_of_most(steps, rows, self.table(Ops))]))
        raise BadInputError(f"{self.path} holds no operators: {self._why_empty()}")

    def _why_empty(self) -> str:
        capture = self.manifest.capture
        if capture.is_complete:
            return "the job ran no training step while it was recorded."
        place = f" in {capture.ends_at}" if capture.ends_at else ""
        reason = f" ({capture.reason})" if capture.reason else ""
        return f"the recording ended early{place}{reason}."


def _last_of_most(steps: Steps, rows: Ints, ops: Ops) -> int:
    """Returns the last of the rows whose operators' names are the most frequent sequence; the later on a tie."""
    codes: dict[str, int] = {}
    names = np.array([codes.setdefault(name, len(codes)) for name in ops.name.tolist()], dtype=np.int64)
    sequences = {
        int(row): names[(ops.op_id >= steps.first_op_id[row]) & (ops.op_id <= steps.last_op_id[row])].tobytes()
        for row in rows[np.argsort(steps.step[rows])]
    }
    counts = Counter(sequences.values())
    return max(enumerate(sequences), key=lambda place: (counts[sequences[place[1]]], place[0]))[1]


def _by_rank(processes: Sequence[FileRank]) -> dict[int, RecordedRank]:
    manifests = number_ranks([process.manifest for process in processes])
    return {
        manifest.rank: replace(process, manifest=manifest)
        for manifest, process in zip(manifests, processes, strict=True)
    }


def _is_folder(path: Path) -> bool:
    """Tells a folder from a file, and a file that is missing because its spool was never packed."""
    spool = path.parent / f"{path.name}.spool"
    try:
        if not path.exists() and spool.is_dir():
            raise BadInputError(f"There is no file {path}, but its recording was not packed: open {spool} instead.")
        return path.is_dir()
    except OSError as error:
        raise unreadable(path, error) from error


def _listed(ranks: tuple[int, ...]) -> str:
    return f"only rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
