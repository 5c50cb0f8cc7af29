"""An open trace: tables that are read on demand, and its steps."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np

from memprof.errors import BadInputError, InvariantError, UsageError
from memprof.trace.cut import StepCuts, cuttable_steps
from memprof.trace.files.archive import unreadable
from memprof.trace.files.container import MemoryRank, write_trace
from memprof.trace.files.reading import located, refuse_special
from memprof.trace.files.recording_files import read_files
from memprof.trace.fullest import comparable_steps, find_fullest_step, find_steady_step, peaks_by_step
from memprof.trace.manifest import Manifest
from memprof.trace.rank_summary import join_summaries, summarise_rank
from memprof.trace.schema import NONE, Ints, Ops, Steps, Storages, Table
from memprof.trace.step import Step
from memprof.trace.usages import read_optimizers

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Trace", "write_trace"]

T = TypeVar("T", bound=Table)


class RecordedRank(Protocol):
    """One process of a trace, in a file or in memory."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the process's recording."""
        ...

    def read(self, kind: type[T], /) -> T:
        """Reads one table; a missing table has no rows."""
        ...

    def read_columns(self, kind: type[Table], names: Sequence[str], /) -> dict[str, Any]:
        """Reads some columns of one table; texts as ``Coded``."""
        ...


class Trace:
    """One rank of a recording, with access to the others.

    Attributes:
        path: The path that was opened.
        rank: The rank that the tables belong to.
        ranks: Every rank of the recording, lowest first.
        manifest: The manifest of the rank.
    """

    def __init__(
        self,
        path: Path,
        processes: Mapping[int, RecordedRank],
        rank: int | None = None,
        summarise: Callable[[], Mapping[type[Table], Table]] | None = None,
    ) -> None:
        """Opens one rank of the processes; the lowest where ``rank`` is left out.

        Args:
            path: The path that was opened.
            processes: The processes by rank.
            rank: The rank that the tables belong to.
            summarise: Reads the tables of ``RANK_TABLES``; where left out they are built from the ranks' own tables.

        Raises:
            UsageError: There is no such rank.
        """
        self._processes = processes
        self._summarise = functools.cache(summarise or functools.partial(_summarise, processes))
        self._tables: dict[type[Table], Table] = {}
        self._lock = threading.RLock()
        self._cuts = StepCuts(weakref.proxy(self))
        self.path = path
        self.ranks = tuple(sorted(processes))
        self.rank = self.ranks[0] if rank is None else rank
        if self.rank not in processes:
            raise UsageError(f"{path} has no rank {rank}; it has {_listed(self.ranks)}.")
        self.manifest = processes[self.rank].manifest

    @staticmethod
    def open(path: str | Path, rank: int | None = None) -> Trace:
        """Opens a .memprof file, several (see ``files.recording_files``), or the spool folder of a recording.

        Tables are read on demand. File content is never executed.

        Args:
            path: What to open; also an address such as ``s3://bucket/run.memprof`` if its package is installed.
            rank: The rank to open, the lowest where left out.

        Raises:
            BadInputError: It is missing, empty, cut short, damaged, foreign or from a newer memprof.
            UsageError: There is no such rank, or the package that opens the address is missing.
        """
        place = located(path)
        refuse_special(place)
        if _is_spool(place):
            from memprof.trace.files.spool_folder import read_spool_folder  # most commands read a file

            return Trace.of(read_spool_folder(place), place, rank)
        files = read_files(place)
        return Trace(place, files.ranks, rank, files.summarise)

    @staticmethod
    def of(
        ranks: Sequence[tuple[Manifest, Mapping[type[Table], Table]]], path: str | Path, rank: int | None = None
    ) -> Trace:
        """Builds a trace from tables in memory, such as those of a spool folder.

        Args:
            ranks: Manifest and tables of each rank; no two the same rank.
            path: Name of the trace.
            rank: The rank to open, the lowest where left out.
        """
        return Trace(Path(path), {manifest.rank: MemoryRank(manifest, tables) for manifest, tables in ranks}, rank)

    def rank_trace(self, rank: int) -> Trace:
        """Returns the trace of another rank of the same recording.

        Raises:
            UsageError: There is no such rank.
        """
        return self if rank == self.rank else Trace(self.path, self._processes, rank, self._summarise)

    def fresh(self, rank: int) -> Trace:
        """Returns the trace of a rank with none of its tables read yet, to be discarded as a whole."""
        return Trace(self.path, self._processes, rank, self._summarise)

    def summary(self, kind: type[T], /) -> T:
        """Returns one of ``RANK_TABLES`` over all ranks, to compare them without reading their own tables.

        Raises:
            BadInputError: A table is damaged.
        """
        return cast(T, self._summarise()[kind])

    def manifest_of(self, rank: int) -> Manifest:
        """Returns the manifest of a rank."""
        return self._processes[rank].manifest

    def table(self, kind: type[T], /) -> T:
        """Returns a table, read from the file on first use.

        Raises:
            BadInputError: The table is damaged.
        """
        with self._lock:
            if kind not in self._tables:
                self._tables[kind] = self._processes[self.rank].read(kind)
            return cast(T, self._tables[kind])

    def columns(self, kind: type[Table], *names: str) -> dict[str, Any]:
        """Reads some columns of a table without caching them, for tables too large to hold in memory.

        Returns:
            The columns by name: numbers as numpy arrays, texts as ``trace.files.columns.Coded``.

        Raises:
            BadInputError: The table is damaged.
        """
        return self._processes[self.rank].read_columns(kind, names)

    def frame(self, kind: type[Table]) -> pd.DataFrame:
        """Returns a table as a pandas DataFrame, with the same column names and values."""
        import pandas as pd  # slow to import, and needed only here

        table = self.table(kind)
        return pd.DataFrame({column.name: getattr(table, column.name) for column in kind.columns()})

    @property
    def recorded_steps(self) -> tuple[int, ...]:
        """Numbers of the recorded steps that have operators; of the warm-up steps if there are none."""
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
            BadInputError: Its tables contradict one another.
            UsageError: The trace has no operators of it; the message lists the steps it has.
        """
        machine = self.manifest.machine
        manifest = self.manifest
        step = replace(
            self._cuts.cut(number),
            allocator_settings=machine.allocator_settings,
            undivided=manifest.undivided,
            optimizers=tuple(read_optimizers(manifest.optimizers)),
            usages=frozenset(manifest.usages),
        )
        try:
            step.check_lives()
        except InvariantError as error:
            raise BadInputError(
                f"{self.path} is damaged: {str(error).removesuffix('.').replace('Step', 'step', 1)}."
            ) from error
        if machine.device_kind == "cpu":  # copies measured there are within its own memory
            return replace(step, short_types=machine.short_types)
        return replace(
            step,
            to_host_bytes_per_us=machine.speed.to_host_bytes_per_us,
            from_host_bytes_per_us=machine.speed.from_host_bytes_per_us,
            product_flops_per_us=(machine.speed.fp32_flops_per_us, machine.speed.bf16_flops_per_us),
        )

    def check_steps(self) -> None:
        """Verifies that every step uses, saves and releases only storages that are alive then.

        Raises:
            BadInputError: Names the first step that does not.
        """
        for number in self._cuts.doubtful():
            self.step(number)

    def steady_step(self) -> Step:
        """Cuts out the representative step: the last one with the most common operator sequence.

        Complete steps take precedence over those in which the recording ends, and recorded steps over the warm-up.

        Raises:
            BadInputError: The trace has no operators at all.
        """
        number = find_steady_step(self.table(Steps), self.table(Ops))
        if number is None:
            raise BadInputError(f"{self.path} holds no operators: {self._why_empty()}")
        return self.step(number)

    def fullest_step(self, *, is_whole: bool = False) -> Step:
        """Cuts out the recorded step with the highest peak; see ``fullest.find_fullest_step``.

        Args:
            is_whole: Only complete steps, if there are any.

        Raises:
            BadInputError: The trace has no operators at all.
        """
        number = find_fullest_step(self.table(Steps), self.table(Ops), self.table(Storages), is_whole=is_whole)
        if number is None:
            raise BadInputError(f"{self.path} holds no operators: {self._why_empty()}")
        return self.step(number)

    def step_peaks(self) -> dict[int, int]:
        """Returns the peak in bytes of each step that counts towards the run's peak, by step number, in order.

        These are the recorded steps, and what was recorded after the last of them; the warm-up steps if no
        other step was recorded. Empty if the trace has no operators.
        """
        steps, ops = self.table(Steps), self.table(Ops)
        steady = find_steady_step(steps, ops)
        if steady is None:
            return {}
        peaks = self.peaks()
        return {number: peaks[number][0] for number in comparable_steps(steps, ops, steady)}

    def peaks(self) -> dict[int, tuple[int, int]]:
        """Returns the peak in bytes of every step with operators, by step number, and the row of its operator."""
        return peaks_by_step(self.table(Steps), self.table(Ops), self.table(Storages))

    def earlier_stacks(self, step: Step) -> Ints:
        """Returns the allocation stacks of storages alive at a step's start, if allocated in an earlier recorded step.

        Returns:
            The stack of the operator that created each storage; NONE where unknown. Shape (storages,).
        """
        storages, ops = self.table(Storages), self.table(Ops)
        made_by = storages.created_op_id[np.searchsorted(storages.storage_id, step.storage_ids)]
        rows = np.minimum(np.searchsorted(ops.op_id, made_by), len(ops) - 1)
        is_earlier = (made_by != NONE) & (made_by < step.first_op_id) & (ops.op_id[rows] == made_by)
        return np.where(is_earlier, ops.stack_id[rows], NONE)

    def _why_empty(self) -> str:
        capture = self.manifest.capture
        if capture.is_complete:
            notes = "; ".join(self.manifest.notes)
            why = f"no step was recorded in full ({notes})" if notes else ""
            return f"{why or 'the job ran no training step while it was recorded'}."
        place = f" in {capture.ends_at}" if capture.ends_at else ""
        reason = f" ({capture.reason})" if capture.reason else ""
        return f"the recording ended early{place}{reason}."


def _summarise(processes: Mapping[int, RecordedRank]) -> dict[type[Table], Table]:
    return join_summaries(summarise_rank(processes[rank].manifest, processes[rank]) for rank in sorted(processes))


def _is_spool(path: Path) -> bool:
    try:
        if not path.is_dir():
            return False
        from memprof.trace.files.spool_folder import is_spool_folder

        return is_spool_folder(path)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _listed(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"only rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
