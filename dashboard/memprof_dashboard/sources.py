"""The open recordings: each is read once, and reread when it has grown."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from memprof.analysis.allocator.device_verdict import DeviceVerdict, judge_device
from memprof.analysis.allocator.imported_blocks import imported_block_sizes
from memprof.analysis.compared.allocation_sequence import (
    AllocationSequence,
    is_recording_file,
    read_sequence,
    sequence_of_recording,
)
from memprof.analysis.report.sources import Sources, find_sources
from memprof.errors import BadInputError, MemprofError
from memprof.replay.history import History
from memprof.trace.files.columns import Coded
from memprof.trace.files.spool_folder import is_spool_folder
from memprof.trace.importers import import_file
from memprof.trace.importers.sniff import SNAPSHOT
from memprof.trace.schema import NONE, Modules, Ops, Stacks, Steps, Storages, Table
from memprof.trace.step import Step
from memprof.trace.store import Trace


class Rank:
    """One process of a recording, with the data of the views, each part read on first use."""

    def __init__(self, trace: Trace) -> None:
        """Wraps the rank's trace."""
        self.trace = trace
        self._lock = threading.RLock()
        self._steps: dict[int, Step] = {}
        self._history: History | None = None
        self._verdicts: dict[int | None, DeviceVerdict] = {}

    @property
    def history(self) -> History:
        """Live bytes during every operator; computed once, also under concurrent access."""
        with self._lock:
            if self._history is None:
                self._history = History(self.trace)
            return self._history

    @cached_property
    def modules(self) -> Modules:
        """The job's modules."""
        return self.trace.table(Modules)

    @cached_property
    def steps(self) -> Steps:
        """The job's steps."""
        return self.trace.table(Steps)

    @cached_property
    def op_names(self) -> Coded:
        """Name of each operator."""
        return self._texts(Ops, "name")

    @cached_property
    def op_stacks(self) -> np.ndarray:
        """Stack of each operator, NONE where none was captured."""
        stacks: np.ndarray = self.trace.columns(Ops, "stack_id")["stack_id"].astype(np.int32)
        return stacks

    @cached_property
    def storage_texts(self) -> dict[str, Coded]:
        """Name, shape, dtype and device of each storage."""
        return {name: self._texts(Storages, name) for name in ("name", "shape", "dtype", "device")}

    @cached_property
    def stacks(self) -> Stacks:
        """The job's Python stacks."""
        return self.trace.table(Stacks)

    @cached_property
    def sources(self) -> Sources:
        """The lines of user code in each stack."""
        return find_sources(self.stacks)

    def verdict(self, budget_bytes: int | None = None) -> DeviceVerdict:
        """Returns whether it fits a budget, or its device; the last few answers are cached.

        Raises:
            BadInputError: The recording is damaged.
        """
        with self._lock:
            if budget_bytes not in self._verdicts:
                self._verdicts = dict(list(self._verdicts.items())[-7:])
                self._verdicts[budget_bytes] = judge_device(self.trace, budget_bytes)
            return self._verdicts[budget_bytes]

    def step_peaks(self) -> dict[int, int]:
        """Returns the peak of each recorded step, in order."""
        numbers = self.steps.step[(self.steps.kind == "recorded") & (self.steps.first_op_id != NONE)].tolist()
        return {number: self._highest(number) for number in numbers}

    def step(self, number: int) -> Step:
        """Returns a step; the last few are cached."""
        with self._lock:
            if number not in self._steps:
                self._steps = dict(list(self._steps.items())[-3:])
                self._steps[number] = self.trace.step(number)
            return self._steps[number]

    def step_range(self, number: int) -> tuple[int, int]:
        """Returns a step's operators as [first, end); all operators where the step has none."""
        rows = np.flatnonzero((self.steps.step == number) & (self.steps.first_op_id != NONE))
        if not len(rows):
            return 0, self.history.ops
        return int(self.steps.first_op_id[rows[0]]), int(self.steps.last_op_id[rows[0]]) + 1

    def fullest_number(self) -> int:
        """Returns the step shown first: the complete step with the highest peak, else the best match; -1 for none."""
        steps = self.steps
        has_ops = (steps.first_op_id != NONE) & (steps.last_op_id != NONE)
        for is_chosen in (
            has_ops & (steps.kind == "recorded") & steps.is_complete,
            has_ops & steps.is_complete,
            has_ops,
        ):
            if is_chosen.any():
                numbers = steps.step[is_chosen].tolist()
                return int(max(numbers, key=lambda number: (self._highest(number), number)))
        return -1

    def _highest(self, number: int) -> int:
        first, end = self.step_range(number)
        return int(self.history.total[first:end].max(initial=0))

    def module_title(self, module_id: int) -> str:
        """Returns a module's qualified name, the type of a root without one, "" outside of any."""
        if module_id == NONE:
            return ""
        return str(self.modules.name[module_id]) or str(self.modules.type[module_id])

    def _texts(self, kind: type[Table], name: str) -> Coded:
        """Reads a column of texts; its codes are as narrow as their number allows."""
        texts: Coded = self.trace.columns(kind, name)[name]
        return Coded(texts.codes.astype(np.min_scalar_type(len(texts.distinct))), texts.distinct)


@dataclass
class Source:
    """One open recording.

    Attributes:
        path: Its path.
        name: Its unique display name.
        trace: The open trace.
        is_snapshot: It is a memory snapshot of torch, imported.
    """

    path: Path
    name: str
    trace: Trace
    is_snapshot: bool = False
    _ranks: dict[int, Rank] = field(default_factory=dict)
    _sequences: dict[int, AllocationSequence] = field(default_factory=dict)
    _stamp: tuple[int, int] = (0, 0)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def is_growing(self) -> bool:
        """Whether the recording may still be in progress: it is a spool folder, or one that was just packed."""
        return is_spool_folder(self.path) or self._packed is not None

    @property
    def _packed(self) -> Path | None:
        """The file that took the place of a spool folder at the end of the job."""
        file = self.path.with_name(self.path.name.removesuffix(".spool"))
        return file if file != self.path and not self.path.exists() and file.is_file() else None

    def rank(self, number: int) -> Rank:
        """Returns one rank; the lowest where the number is unknown."""
        with self._lock:
            number = number if number in self.trace.ranks else self.trace.rank
            if number not in self._ranks:
                self._ranks[number] = Rank(self.trace.rank_trace(number))
            return self._ranks[number]

    def sequence(self, number: int) -> AllocationSequence:
        """Returns the allocations of one rank in their order; of a snapshot, its whole history.

        Args:
            number: The rank, a snapshot's device; where unknown the lowest, or the device with the longest history.

        Raises:
            BadInputError: There are none, or the file is damaged.
        """
        with self._lock:
            if number not in self._sequences:
                device = number if number in self.trace.ranks else None
                self._sequences[number] = (
                    read_sequence(str(self.path), device)
                    if self.is_snapshot
                    else sequence_of_recording(self.rank(number).trace)
                )
            return self._sequences[number]

    def refresh(self) -> bool:
        """Rereads the recording where it has grown, or the packed file at its end; returns whether it was reread.

        Raises:
            BadInputError: It is gone, or damaged.
        """
        with self._lock:
            if (packed := self._packed) is not None:
                self.path, self.name = packed, self.name.removesuffix(".spool")
        stamp = _stamp(self.path)
        with self._lock:
            if stamp == self._stamp:
                return False
            is_first, self._stamp = self._stamp == (0, 0), stamp
            if is_first:
                return False
            self.trace, self.is_snapshot = _open(self.path)
            self._ranks, self._sequences = {}, {}
            return True


class Workspace:
    """The open recordings, by index."""

    def __init__(self, sources: list[Source]) -> None:
        """Stores the recordings, at least one."""
        self.sources = sources

    def source(self, place: int) -> Source:
        """Returns a recording; the first where the index is out of range."""
        return self.sources[place if 0 <= place < len(self.sources) else 0]

    def rank(self, place: int, number: int) -> Rank:
        """Returns one process of a recording."""
        return self.source(place).rank(number)


def open_sources(paths: list[Path]) -> list[Source]:
    """Opens recordings, and what can be imported as one: memory snapshots and profiler traces.

    Raises:
        BadInputError: One is missing, damaged, foreign or of a newer memprof; the sentence names it.
    """
    sources = []
    for path in paths:
        trace, is_snapshot = _open(path)
        sources.append(Source(path, _name(path, paths), trace, is_snapshot))
        sources[-1].refresh()
    return sources


def _open(path: Path) -> tuple[Trace, bool]:
    """Returns a file's trace, imported where it is not a recording, and whether it is a memory snapshot."""
    if path.suffix == ".memprof" or not path.is_file() or is_recording_file(path):
        return Trace.open(path), False
    imported = import_file(path, block_sizes=imported_block_sizes)
    return Trace.of(imported.ranks, path), imported.kind == SNAPSHOT


def _name(path: Path, paths: list[Path]) -> str:
    """Returns the shortest suffix of a path that is unique among the paths."""
    parts = path.resolve().parts
    for count in range(1, len(parts)):
        name = "/".join(parts[-count:])
        if sum("/".join(other.resolve().parts[-count:]) == name for other in paths) <= 1:
            return name
    return str(path)


def _stamp(path: Path) -> tuple[int, int]:
    """Returns a stamp that changes when a recording grows."""
    try:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        stats = [file.stat() for file in files]
    except OSError as error:
        raise BadInputError(f"{path} cannot be read any more ({error.strerror}): it was moved or deleted.") from error
    return sum(stat.st_size for stat in stats) + len(stats), max((stat.st_mtime_ns for stat in stats), default=0)


__all__ = ["MemprofError", "Rank", "Source", "Workspace", "open_sources"]
