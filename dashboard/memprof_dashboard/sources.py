"""The open recordings: each is read once, and reread when it has grown."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.errors import BadInputError, MemprofError
from memprof.trace.files.spool_folder import is_spool_folder
from memprof.trace.manifest import PREDICTED
from memprof.trace.running import is_being_written
from memprof.trace.store import Trace
from memprof_dashboard.rank import Rank
from memprof_dashboard.whatif.dry_frames import DryFrames

# The page is served before what analyzes a recording is imported (see opening.py).
if TYPE_CHECKING:
    from memprof.analysis.compared.allocation_sequence import AllocationSequence

#: Size and newest time of a recording's files, and whether they are still being written.
_Stamp = tuple[int, int, bool]


@dataclass
class Source:
    """One open recording.

    Attributes:
        path: Its path.
        name: Its unique display name.
        trace: The open trace.
        is_snapshot: It is a memory snapshot of torch, imported.
        version: Number of times that it was reread.
    """

    path: Path
    name: str
    trace: Trace
    is_snapshot: bool = False
    version: int = 0
    _ranks: dict[int, Rank] = field(default_factory=dict)
    _sequences: dict[int, AllocationSequence] = field(default_factory=dict)
    _worst_rank: int | None = None
    _stamp: _Stamp | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def is_spool(self) -> bool:
        """Whether the file of the recording is still missing: it is a spool folder, or was one until just now."""
        return is_spool_folder(self.path) or self._packed is not None

    @property
    def is_growing(self) -> bool:
        """Whether the recording is still in progress: its job or the memprof that records it is running."""
        return self.is_spool and (self._packed is not None or is_being_written(self.path))

    @property
    def _packed(self) -> Path | None:
        return packed_file(self.path)

    def rank(self, number: int) -> Rank:
        """Returns one rank; the one with the highest peak where the number is unknown."""
        with self._lock:
            number = number if number in self.trace.ranks else self._worst()
            if number not in self._ranks:
                self._ranks[number] = Rank(self.trace.rank_trace(number))
            return self._ranks[number]

    def _worst(self) -> int:
        """Returns the rank with the highest peak; the lowest where the recording does not say."""
        if self._worst_rank is None:
            self._worst_rank = self.trace.rank
            if len(self.trace.ranks) > 1:
                from memprof.analysis.allocator.allocator_report import fullest_rank

                with contextlib.suppress(MemprofError):  # a job that is still running has no summaries
                    self._worst_rank = fullest_rank(self.trace)
        return self._worst_rank

    def sequence(self, number: int) -> AllocationSequence:
        """Returns the allocations of one rank in their order; of a snapshot, its whole history.

        Args:
            number: The rank, a snapshot's device; where unknown the lowest, or the device with the longest history.

        Raises:
            BadInputError: There are none, or the file is damaged.
        """
        from memprof.analysis.compared.allocation_sequence import read_sequence, sequence_of_recording

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
        """Rereads the recording where it has grown or its job has ended, or the packed file at its end.

        Returns:
            Whether it was reread.

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
            if self._stamp is None:
                self._stamp = stamp
                return False
            self.trace, self.is_snapshot = _open(self.path)
            self._stamp = stamp  # not before: what cannot be read just now is read at the next look
            self._ranks, self._sequences, self._worst_rank = {}, {}, None
            self.version += 1
            return True


class Workspace:
    """The open recordings, by index."""

    def __init__(self, sources: list[Source], dry_frames: DryFrames | None = None) -> None:
        """Stores the recordings, at least one.

        Args:
            sources: The recordings.
            dry_frames: Dry runs of their jobs; None to run nothing.
        """
        self.sources = sources
        self.dry_frames = dry_frames or DryFrames(may_run=False)
        self._lock = threading.Lock()
        self._folders = {source.path.resolve().parent for source in sources}
        self._seen = _stamped_in(self._folders)

    def open_new_runs(self) -> tuple[Source, ...]:
        """Opens recordings made under a plan that have appeared in the recordings' folders since the last look.

        Returns:
            Those opened now. A file that was there before this workspace, is not a whole recording, or was not made
            under a plan is left alone.
        """
        with self._lock:
            opened = []
            own = {source.path.resolve() for source in self.sources}
            new = _stamped_in(self._folders) - self._seen
            self._seen |= new
            for path in sorted({path for path, _ in new} - own):
                try:
                    trace = Trace.open(path)
                except MemprofError:
                    continue
                if trace.manifest.plan is None or trace.manifest.backend.name == PREDICTED:
                    continue
                opened.append(Source(path, _name(path, [*(one.path for one in self.sources), path]), trace))
                opened[-1].refresh()
                self.sources.append(opened[-1])
            return tuple(opened)

    @property
    def version(self) -> int:
        """Number that grows whenever a recording is reread."""
        return sum(source.version for source in self.sources)

    def second_of(self, place: int) -> tuple[int, str] | None:
        """Returns place and name of the other recording where exactly two are open, else None."""
        if len(self.sources) != 2:
            return None
        second = 0 if place == 1 else 1
        return second, self.sources[second].name

    def source(self, place: int) -> Source:
        """Returns a recording; the first where the index is out of range."""
        return self.sources[place if 0 <= place < len(self.sources) else 0]

    def rank(self, place: int, number: int) -> Rank:
        """Returns one process of a recording."""
        return self.source(place).rank(number)


def packed_file(spool: Path) -> Path | None:
    """Returns the file that took the place of a spool folder at the end of its job; None while the folder exists."""
    file = spool.with_name(spool.name.removesuffix(".spool"))
    return file if file != spool and not spool.exists() and file.is_file() else None


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
    if path.suffix == ".memprof" or not path.is_file():
        return Trace.open(path), False
    from memprof.analysis.allocator.imported_parts import imported_block_sizes
    from memprof.analysis.compared.allocation_sequence import is_recording_file
    from memprof.trace.importers.importing import import_file
    from memprof.trace.importers.sniff import SNAPSHOT

    if is_recording_file(path):
        return Trace.open(path), False
    imported = import_file(path, block_sizes=imported_block_sizes)
    return Trace.of(imported.ranks, path), imported.kind == SNAPSHOT


def _stamped_in(folders: set[Path]) -> set[tuple[Path, int]]:
    """Returns the recordings in some folders with the times they were written; none of a folder that is unreadable."""
    found: set[tuple[Path, int]] = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            found.update((path, path.stat().st_mtime_ns) for path in folder.iterdir() if path.suffix == ".memprof")
    return found


def _name(path: Path, paths: list[Path]) -> str:
    """Returns the shortest suffix of a path that is unique among the paths."""
    parts = path.resolve().parts
    for count in range(1, len(parts)):
        name = "/".join(parts[-count:])
        if sum("/".join(other.resolve().parts[-count:]) == name for other in paths) <= 1:
            return name
    return str(path)


def _stamp(path: Path) -> _Stamp:
    """Returns a stamp that changes when a recording grows, and when its job ends."""
    try:
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        stats = [file.stat() for file in files]
    except OSError as error:
        raise BadInputError(f"{path} cannot be read any more ({error.strerror}): it was moved or deleted.") from error
    size, newest = (
        sum(stat.st_size for stat in stats) + len(stats),
        max((stat.st_mtime_ns for stat in stats), default=0),
    )
    return size, newest, is_spool_folder(path) and is_being_written(path)


__all__ = ["MemprofError", "Rank", "Source", "Workspace", "open_sources"]
