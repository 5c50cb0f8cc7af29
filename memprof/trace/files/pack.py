"""Packs the spool folder that a job leaves behind into a trace."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from memprof.errors import BadInputError, MemprofError, OutputError
from memprof.trace.files.container import write_trace
from memprof.trace.files.spool_folder import Assembler, SpoolFolder, Tables
from memprof.trace.manifest import Manifest
from memprof.trace.schema import AllocatorEvents, Ops, Steps, Table
from memprof.units import format_bytes, format_count


@dataclass(frozen=True)
class PackResult:
    """The result of packing.

    Attributes:
        path: The trace that was written.
        ranks: The ranks in it.
        steps_recorded: Recorded steps of the first rank, excluding the warm-up.
        events: Allocator events of all ranks.
        message: One line for the user.
        remark: Problems, which the message includes: a rank that could not be packed, a spool folder that was kept.
    """

    path: Path
    ranks: tuple[int, ...]
    steps_recorded: int
    events: int
    message: str
    remark: str = ""


def pack_spool(folder: str | Path, output: str | Path, assemble: Assembler | None = None) -> PackResult:
    """Packs a spool folder into a .memprof file and removes it.

    Raises:
        BadInputError: No process of the job was recorded.
        MemprofError: The file cannot be written; the spool folder is kept.
    """
    folder, output = Path(folder), Path(output)
    spool = SpoolFolder.open(folder, assemble)
    tally = _Tally()
    try:
        write_trace(output, tally.counted(spool))
    except OutputError as error:
        raise MemprofError(
            f"{output} cannot be written ({error.reason}); the recording is safe in {folder}, which opens "
            f"like a trace: memprof report {folder}"
        ) from error
    remark = ""
    if tally.faults:
        remark = _describe_faults(tally.faults, folder)
    else:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            remark = f"Its spool {folder} could not be removed: {error.strerror or error}."
    return PackResult(
        path=output,
        ranks=tuple(manifest.rank for manifest in tally.manifests),
        steps_recorded=tally.steps_recorded,
        events=tally.rows[AllocatorEvents],
        message=f"{_message(output, tally)} {remark}".rstrip(),
        remark=remark,
    )


class _Tally:
    """Counts what passes through, and keeps none of it in memory."""

    def __init__(self) -> None:
        self.manifests: list[Manifest] = []
        self.steps_recorded = 0
        self.rows: dict[type[Table], int] = {Ops: 0, AllocatorEvents: 0}
        self.faults: dict[int, str] = {}

    def counted(self, spool: SpoolFolder) -> Iterator[tuple[Manifest, Tables]]:
        """Yields the ranks.

        Raises:
            BadInputError: No rank was recorded.
            MemprofError: No rank could be assembled.
        """
        for manifest, tables in spool.ranks(self.faults):
            if not self.manifests:
                steps = tables.get(Steps)
                self.steps_recorded = int((steps.kind == "recorded").sum()) if isinstance(steps, Steps) else 0
            self.manifests.append(manifest)
            for kind in self.rows:
                self.rows[kind] += len(tables[kind]) if kind in tables else 0
            yield manifest, tables
        if self.faults and not self.manifests:
            fault = next(iter(self.faults.values()))
            raise MemprofError(f"the recording cannot be read ({fault}). Its raw rows stay in {spool.folder}.")
        if not self.manifests:
            raise BadInputError(spool.describe_nothing())


def _describe_faults(faults: Mapping[int, str], folder: Path) -> str:
    first = next(iter(faults))
    others = f", nor could {len(faults) - 1:,} more" if len(faults) > 1 else ""
    return f"Rank {first} could not be packed ({faults[first]}){others}: the raw recordings stay in {folder}."


def _message(output: Path, tally: _Tally) -> str:
    capture = tally.manifests[0].capture
    what = [format_count(tally.steps_recorded, "step"), format_count(tally.rows[Ops], "operator")]
    what.append(format_count(tally.rows[AllocatorEvents], "allocator event"))
    if len(tally.manifests) > 1:
        what.append(format_count(len(tally.manifests), "process", "processes"))
    message = f"{output}: {', '.join(what)} in {format_bytes(output.stat().st_size)}."
    if not capture.is_complete:
        place = f" in {capture.ends_at}" if capture.ends_at else ""
        reason = f": {capture.reason}" if capture.reason else ""
        message += f" The recording ends early{place}{reason}."
    return message
