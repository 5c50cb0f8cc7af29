"""Turns the spool folder a job leaves behind into a trace."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memprof.errors import BadInputError, MemprofError
from memprof.trace.container import write_trace
from memprof.trace.manifest import Manifest, number_ranks
from memprof.trace.schema import NONE, AllocatorEvents, HostMemory, Ops, Steps, Table
from memprof.trace.trim import drop_warm_up
from memprof.units import format_bytes

Tables = dict[type[Table], Table]

#: Makes tables of one process's folder, given launch.json and exit.json; None where nothing was recorded.
Assembler = Callable[[Path, dict[str, Any], dict[str, Any] | None], tuple[Manifest, Tables] | None]


@dataclass(frozen=True)
class PackResult:
    """What was packed.

    Attributes:
        path: The trace written.
        ranks: The ranks in it.
        steps_recorded: Recorded steps of the first rank, the warm-up left out.
        events: Allocator events of all ranks.
        message: One line for the user.
    """

    path: Path
    ranks: tuple[int, ...]
    steps_recorded: int
    events: int
    message: str


def is_spool_folder(folder: Path) -> bool:
    """Returns whether a folder is the spool of a recording."""
    return (folder / "launch.json").is_file() or any(folder.glob("process-*/"))


def read_spool_folder(folder: str | Path, assemble: Assembler | None = None) -> list[tuple[Manifest, Tables]]:
    """Reads the recording of every process of a job, whether or not the job ended well.

    Args:
        folder: The spool folder.
        assemble: Makes the tables of one process; ``memprof.trace.assemble`` where left out.

    Returns:
        Manifest and tables of each recorded process, by rank and start, ranks unique, warm-up left out.

    Raises:
        BadInputError: No process of the job was recorded; the sentence says what became of the job.
    """
    folder = Path(folder)
    launch = _read_json(folder / "launch.json") or {}
    ended = _read_json(folder / "exit.json")
    if assemble is None:
        # Here because assembling is of no use to whoever opens a finished trace.
        from memprof.trace.assemble import assemble_process

        assemble = assemble_process
    recorded = [assemble(process, launch, ended) for process in sorted(folder.glob("process-*/"))]
    ranks = sorted(
        (rank for rank in recorded if rank is not None),
        key=lambda rank: (rank[0].rank, rank[0].created_us, rank[0].pid),
    )
    if not ranks:
        raise BadInputError(_nothing_recorded(folder, launch, ended))
    manifests = number_ranks([manifest for manifest, _ in ranks])
    host = _read_host_memory(folder / "host.jsonl")
    is_child = ~np.isin(host.pid, [manifest.pid for manifest in manifests])
    # Until a process trains, the parent cannot know that it will.
    host = host.replace(role=np.where(is_child, host.role, "trainer").astype(object))
    packed = []
    for place, (manifest, (_, tables)) in enumerate(zip(manifests, ranks, strict=True)):
        # Data loader workers and other children are counted once, with the first rank.
        is_shown = (host.pid == manifest.pid) | (is_child & (place == 0))
        packed.append((manifest, {**drop_warm_up(tables), HostMemory: host.take(is_shown)}))
    return packed


def pack_spool(folder: str | Path, output: str | Path, assemble: Assembler | None = None) -> PackResult:
    """Packs a spool folder into a .memprof file and removes it.

    Args:
        folder: The spool folder.
        output: The file to write or replace.
        assemble: As in ``read_spool_folder``.

    Raises:
        BadInputError: No process of the job was recorded.
        MemprofError: The file cannot be written; the spool folder stays.
    """
    folder, output = Path(folder), Path(output)
    ranks = read_spool_folder(folder, assemble)
    try:
        write_trace(output, ranks)
    except OSError as error:
        raise MemprofError(
            f"{output} cannot be written ({error.strerror or error}); the recording is safe in {folder}, which opens "
            f"like a trace: memprof report {folder}"
        ) from error
    message = _message(output, ranks)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        message += f" Its spool {folder} could not be removed: {error.strerror or error}."
    return PackResult(
        path=output,
        ranks=tuple(manifest.rank for manifest, _ in ranks),
        steps_recorded=_recorded_steps(ranks[0][1]),
        events=_rows(ranks, AllocatorEvents),
        message=message,
    )


def _message(output: Path, ranks: list[tuple[Manifest, Tables]]) -> str:
    capture = ranks[0][0].capture
    what = [_count(_recorded_steps(ranks[0][1]), "step"), _count(_rows(ranks, Ops), "operator")]
    what.append(_count(_rows(ranks, AllocatorEvents), "allocator event"))
    if len(ranks) > 1:
        what.append(_count(len(ranks), "process", "processes"))
    message = f"{output}: {', '.join(what)} in {format_bytes(output.stat().st_size)}."
    if not capture.is_complete:
        place = f" in {capture.ends_at}" if capture.ends_at else ""
        reason = f": {capture.reason}" if capture.reason else ""
        message += f" The recording ends early{place}{reason}."
    return message


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _rows(ranks: list[tuple[Manifest, Tables]], kind: type[Table]) -> int:
    return sum(len(tables.get(kind, kind.empty())) for _, tables in ranks)


def _recorded_steps(tables: Mapping[type[Table], Table]) -> int:
    steps = tables.get(Steps)
    return int((steps.kind == "recorded").sum()) if isinstance(steps, Steps) else 0


def _nothing_recorded(folder: Path, launch: Mapping[str, Any], ended: Mapping[str, Any] | None) -> str:
    command = " ".join(str(part) for part in launch.get("command", ())) or "the job"
    if ended is None:
        became = "is still running, or memprof was killed with it"
    elif ended.get("returncode", 0) < 0:
        became = f"was ended by signal {-ended['returncode']}"
    else:
        became = f"ended with status {ended.get('returncode', 0)}"
    return f"{folder} holds no recording: {command} {became}, and none of its processes ran a training step with torch."


def _read_json(path: Path) -> dict[str, Any] | None:
    """Reads one of the parent's files; None where it was not written."""
    try:
        record = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{path} is damaged: it is no JSON.") from error
    if not isinstance(record, dict):
        raise BadInputError(f"{path} is damaged: it is no JSON object.")
    return record


def _read_host_memory(path: Path) -> HostMemory:
    """Reads the parent's samples; a line cut short by a kill is left out."""
    if not path.is_file():
        return HostMemory.empty()
    samples = []
    for line in path.read_bytes().splitlines():
        try:
            sample = json.loads(line)
            samples.append(
                (
                    float(sample["time_us"]),
                    int(sample["pid"]),
                    str(sample["role"]),
                    int(sample["rss_bytes"]),
                    NONE if sample.get("private_bytes") is None else int(sample["private_bytes"]),
                )
            )
        except (ValueError, KeyError, TypeError):
            continue
    if not samples:
        return HostMemory.empty()
    names = [column.name for column in dataclasses.fields(HostMemory)]
    return HostMemory.of(**dict(zip(names, zip(*samples, strict=True), strict=True)))
