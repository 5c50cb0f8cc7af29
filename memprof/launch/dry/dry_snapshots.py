"""Dry-runs a job on a device and collects the memory snapshots that the job itself takes."""

from __future__ import annotations

import os
from pathlib import Path

from memprof.launch.dry.dry_outcome import EndedError
from memprof.launch.parent.recorded_job import run_recorded
from memprof.launch.parent.relay import ENDING
from memprof.launch.parent.settings import Settings
from memprof.launch.parent.target import CannotStartError, Target

#: Maximum characters of an error's last line in messages.
_MOST_SAID = 300


def collect_snapshots(target: Target, device: str, name: str, folder: Path) -> list[Path]:
    """Runs a job on tensors without memory; its snapshots go to a folder, not to where the job writes them.

    The job ends after the snapshot of this name, or else where it would end.

    Args:
        target: The job.
        device: The simulated device, a name of the catalogue.
        name: Name of the file that the job writes its snapshot to, such as ``snapshot.pickle``.
        folder: An empty folder.

    Returns:
        The snapshots in the order in which they were taken; their names end in those the job chose.

    Raises:
        CannotStartError: The job took no snapshot.
        EndedError: A signal that asks the whole command to end arrived during the run.
    """
    snapshots = folder / "snapshots"
    snapshots.mkdir()
    settings = Settings(
        output=folder / "dry.memprof",
        force=True,
        stop=True,
        dry_run=True,
        device=device,
        snapshots=snapshots,
        snapshot_name=name,
    )
    with open(os.devnull, "wb") as nothing, (folder / "errors").open("w+b") as errors:
        done = run_recorded(target, settings, nothing.fileno(), errors.fileno())
        if ending := sorted(done.signals & ENDING):
            raise EndedError(ending[0])
        errors.seek(0)
        said = errors.read().decode("utf-8", errors="replace").splitlines()
    found = sorted(snapshots.iterdir())
    if not found:
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        if done.refusal or done.returncode:
            raise CannotStartError(
                f"{target.name} took no memory snapshot: its dry run failed: {done.refusal or last[:_MOST_SAID]}"
            )
        raise CannotStartError(
            f"{target.name} took no memory snapshot in its dry run. It must call "
            "torch.cuda.memory._record_memory_history() and _dump_snapshot(), as it did for the snapshot to compare."
        )
    return found
