"""Turns the raw recording of one process into the tables of a trace."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memprof.trace.manifest import Manifest
    from memprof.trace.schema import Table

__all__ = ["assemble_devices"]


def assemble_devices(
    folder: Path, launch: Mapping[str, Any], exit_record: Mapping[str, Any] | None
) -> list[tuple[Manifest, dict[type[Table], Table]]]:
    """Assembles one process's recording once for each device whose memory it used, the most bytes first.

    Each result has all operators and the storages in its own device's memory; other storages have 0 allocated bytes.

    Args:
        folder: The process's folder in the spool.
        launch: The launch record that the parent process wrote when it started the job.
        exit_record: The exit record that the parent wrote when the job ended; None while it runs.

    Raises:
        OSError: The recording cannot be read.
    """
    # Imported here because reports read names of this package's modules without assembling anything.
    from memprof.trace.assemble.describe import JobRecords
    from memprof.trace.assemble.light.process import assemble_light, is_light
    from memprof.trace.assemble.process import assemble_all
    from memprof.trace.files.spool import read_spool

    job = JobRecords(folder, launch, exit_record)
    if is_light(folder):
        light = assemble_light(job)
        return [] if light is None else [light]
    return assemble_all(job, read_spool(folder))
