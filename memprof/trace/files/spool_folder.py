"""The spool folder that a job leaves behind: which processes it holds, and the tables of each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from memprof.errors import BadInputError, NotStartedError
from memprof.trace.consistency import InvariantError, check_tables
from memprof.trace.files.reading import parse_json, read_bytes
from memprof.trace.files.spool import FILE_NAME, peek_spool
from memprof.trace.files.trim import drop_warm_up
from memprof.trace.manifest import Manifest, number_ranks
from memprof.trace.running import is_being_written
from memprof.trace.schema import NONE, HostLimits, HostMemory, Table

_Rows = TypeVar("_Rows", bound=Table)
Tables = dict[type[Table], Table]

#: Exceptions raised when rows and records that contradict one another are assembled into tables.
_NONSENSE = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError, InvariantError)

#: Builds the tables of one process's folder, given launch.json and exit.json: one result per device used, empty where
#: nothing was recorded.
Assembler = Callable[[Path, dict[str, Any], dict[str, Any] | None], Sequence[tuple[Manifest, Tables]]]


def is_spool_folder(folder: Path) -> bool:
    """Returns whether a folder is the spool of a recording."""
    return (folder / "launch.json").is_file() or any(folder.glob("process-*/"))


def read_spool_folder(folder: str | Path, assemble: Assembler | None = None) -> list[tuple[Manifest, Tables]]:
    """Reads the recording of every process of a job, however the job ended.

    Args:
        folder: The spool folder.
        assemble: Builds the tables of one process; ``memprof.trace.assemble`` where left out.

    Returns:
        Manifest and tables of each recorded process, by rank and start, ranks unique, without the warm-up.

    Raises:
        BadInputError: No process of the job was recorded; the message says how the job ended.
    """
    spool = SpoolFolder.open(Path(folder), assemble, keep=True)
    packed = list(spool.ranks())
    if not packed:
        raise (NotStartedError if spool.ended is None else BadInputError)(spool.describe_nothing())
    return packed


@dataclass(frozen=True)
class SpoolFolder:
    """A spool folder, and the rank of each of its processes.

    Attributes:
        folder: The spool folder.
        launch: The launch record that the parent wrote when it started the job.
        ended: The exit record that it wrote at the end; None while the job runs, empty where memprof was killed before
            it wrote one.
        assemble: Builds the tables of one process.
        processes: Folder, rank and further notes of each process with a recording, by rank.
        pids: Their process ids.
    """

    folder: Path
    launch: dict[str, Any]
    ended: dict[str, Any] | None
    assemble: Assembler
    processes: tuple[tuple[Path, int, tuple[str, ...]], ...]
    pids: tuple[int, ...]

    @staticmethod
    def open(folder: Path, assemble: Assembler | None, *, keep: bool = False) -> SpoolFolder:
        """Determines which processes a spool folder holds recordings of.

        Args:
            folder: The spool folder.
            assemble: As in ``read_spool_folder``.
            keep: Cache assembled processes, for a caller that holds all of them anyway.
        """
        launch = _read_json(folder / "launch.json") or {}
        is_running = is_being_written(folder)  # looked at first: a job that has ended has then written the exit record
        ended = _read_json(folder / "exit.json")
        if ended is None and not is_running:
            ended = {}
        if assemble is None:
            # Imported here because opening a finished trace does not need it.
            from memprof.trace.assemble import assemble_devices

            assemble = assemble_devices
        if keep:
            assemble = _checked_once(assemble)
        found = _starts(folder)
        if not found:  # every process is assembled to see which have a recording, and the tables are discarded
            assembled = ((path, assemble(path, launch, ended)) for path in _processes(folder))
            found = [(path, devices[0][0]) for path, devices in assembled if devices]
        found.sort(key=lambda one: (one[1].rank, one[1].created_us, one[1].pid))
        manifests = number_ranks([manifest for _, manifest in found])
        return SpoolFolder(
            folder,
            launch,
            ended,
            assemble,
            tuple((path, one.rank, one.notes) for (path, _), one in zip(found, manifests, strict=True)),
            tuple(manifest.pid for manifest in manifests),
        )

    def ranks(self, faults: dict[int, str] | None = None) -> Iterator[tuple[Manifest, Tables]]:
        """Assembles the processes one by one.

        Args:
            faults: Collects why ranks could not be assembled; raised instead where left out.
        """
        host, limits = read_host(self.folder / "host.jsonl")
        is_child = ~np.isin(host.pid, self.pids)
        # The parent cannot know whether a process will train until it does.
        host = host.replace(role=np.where(is_child, host.role, "trainer").astype(object))
        is_first = True
        following = max((rank for _, rank, _ in self.processes), default=0) + 1
        for path, rank, notes in self.processes:
            try:
                assembled = self.assemble(path, self.launch, self.ended)
            except Exception as error:
                if faults is None:
                    raise
                # One bad rank must not lose what the other ranks recorded; the raw recording is kept.
                faults[rank] = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            for place, (manifest, tables) in enumerate(assembled):
                # Data loader workers and other children are counted once, with the first rank.
                is_shown = ((host.pid == manifest.pid) & (place == 0)) | (is_child & is_first)
                of_job = limits.take(slice(None if is_first else 0))
                is_first = False
                fresh = tuple(note for note in notes if note not in manifest.notes)
                # Additional devices of a process follow all processes.
                number, following = (following, following + 1) if place else (rank, following)
                named = dataclasses.replace(manifest, rank=number, notes=(*manifest.notes, *fresh))
                yield named, {**drop_warm_up(tables), HostMemory: host.take(is_shown), HostLimits: of_job}

    def describe_nothing(self) -> str:
        """Returns why the folder holds no recording: how the job ended."""
        folder, launch, ended = self.folder, self.launch, self.ended
        command = " ".join(str(part) for part in launch.get("command", ())) or "the job"
        if ended is None or ended.get("is_running"):
            became = "is still running"
        elif "returncode" not in ended:
            became = "ended without finishing its recording"
        elif ended["returncode"] < 0:
            became = f"was ended by signal {-ended['returncode']}"
        else:
            became = f"ended with status {ended['returncode']}"
        return (
            f"{folder} holds no recording: {command} {became}, and none of its processes ran a training step with "
            "torch."
        )


def _processes(folder: Path) -> list[Path]:
    """Returns the folders of recorded processes; that of a job that let no file be created is empty."""
    return [path for path in sorted(folder.glob("process-*/")) if any(path.rglob(FILE_NAME))]


def _starts(folder: Path) -> list[tuple[Path, Manifest]]:
    """Identifies recorded processes by the starts of their recordings; empty where these do not give unique ranks."""
    found = []
    for path in _processes(folder):
        start, has_operators = peek_spool(path)
        if start is not None and has_operators:
            try:
                found.append((path, Manifest(rank=start["rank"], created_us=start["time_ns"] / 1000, pid=start["pid"])))
            except (KeyError, TypeError):
                return []  # it is damaged, and assembling reports how
    return found if len({manifest.rank for _, manifest in found}) == len(found) else []


def _checked_once(assemble: Assembler) -> Assembler:
    """Assembles each process once; a damaged recording, whose rows and records contradict one another, is an error."""
    known: dict[Path, Sequence[tuple[Manifest, Tables]]] = {}

    def checked(path: Path, launch: dict[str, Any], ended: dict[str, Any] | None) -> Sequence[tuple[Manifest, Tables]]:
        if path in known:
            return known[path]
        try:
            assembled = assemble(path, launch, ended)
            for _, tables in assembled:
                check_tables(tables)
        except _NONSENSE as error:
            detail = str(error).strip().partition("\n")[0][:200] or type(error).__name__
            raise BadInputError(
                f"the raw recording in {path} is damaged: its rows contradict one another "
                f"({type(error).__name__}: {detail})."
            ) from error
        return known.setdefault(path, assembled)

    return checked


def _read_json(path: Path) -> dict[str, Any] | None:
    """Reads one of the parent's files; None where it was not written."""
    try:
        record = parse_json(read_bytes(path), strict=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise BadInputError(f"{path} is damaged: it is not JSON.") from error
    if not isinstance(record, dict):
        raise BadInputError(f"{path} is damaged: it is not a JSON object.")
    return record


def read_host(path: Path) -> tuple[HostMemory, HostLimits]:
    """Reads the parent's samples of processes and of limits; lines cut short by a kill or out of range are dropped."""
    samples: list[tuple[Any, ...]] = []
    limits: list[tuple[Any, ...]] = []
    names = [column.name for column in HostMemory.columns()]
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            sample = json.loads(line)
            time_us = float(sample["time_us"])
            _whole(time_us)  # neither infinite nor NaN
            if "limit" in sample:
                total, free = int(sample["total_bytes"]), int(sample["free_bytes"])
                limits.append((time_us, str(sample["limit"]), _whole(total), _whole(total - free)))
                continue
            sizes = [NONE if sample.get(name) is None else _whole(sample[name]) for name in names[4:]]
            samples.append((time_us, _whole(sample["pid"]), str(sample["role"]), _whole(sample["rss_bytes"]), *sizes))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return _of_rows(HostMemory, samples), _of_rows(HostLimits, limits)


def _whole(value: Any) -> np.int64:
    """Returns a number as a column of integers holds it; OverflowError for infinities and for more than 63 bits."""
    return np.int64(int(value))


def _of_rows(kind: type[_Rows], rows: list[tuple[Any, ...]]) -> _Rows:
    names = [column.name for column in kind.columns()]
    return kind.of(**dict(zip(names, zip(*rows, strict=True), strict=True))) if rows else kind.empty()
