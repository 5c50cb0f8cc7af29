"""The files of `memprof fit`: the recording of the unmodified job, the plan, and the recording under it."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from memprof.launch.outcome.output import refuse_taken, spool_of
from memprof.launch.parent.target import CannotStartError

_PLAN = ".toml"


@dataclass(frozen=True)
class Outputs:
    """The output paths.

    Attributes:
        plan: The plan, written once a run under it was measured to fit.
        run: The recording of the unmodified job.
        head: The recording under the plan.
        folder: The folder created for them; None if they are in an existing one.
    """

    plan: Path
    run: Path
    head: Path
    folder: Path | None = None

    @property
    def attempt(self) -> Path:
        """The recording under the plan being tried."""
        return self.head.with_name(f"{self.head.stem}.attempt.memprof")

    def keep_attempt(self) -> None:
        """Renames the recording of the last attempt to the one under the plan."""
        self.attempt.replace(self.head)

    def remove_if_empty(self) -> None:
        """Removes the created folder if it is empty."""
        if self.folder is not None and self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()


def claim_outputs(output: Path | None, stem: str, *, force: bool) -> Outputs:
    """Chooses the output paths, and creates the folder.

    Args:
        output: A folder, or a plan file (``.toml``), with the recordings written next to it; None for the folder
            ``<stem>.<time>.fit``.
        stem: Name of the job.
        force: Overwrite the files of an earlier fit.

    Raises:
        CannotStartError: An output exists already, or the location is not writable.
    """
    if output is None:
        output = _free_name(f"{stem}.{time.strftime('%Y%m%d-%H%M%S')}")
    if output.suffix == _PLAN:
        outputs = Outputs(output, output.with_suffix(".run.memprof"), output.with_suffix(".head.memprof"))
    else:
        outputs = Outputs(output / "plan.toml", output / "run.memprof", output / "head.memprof", output)
    for path in (outputs.plan, outputs.run, outputs.head):
        refuse_taken(path, force=force)
    try:
        if outputs.folder is not None:
            outputs.folder.mkdir(exist_ok=True)
        # If kept, they would be mistaken for this run's.
        outputs.plan.unlink(missing_ok=True)
        for path in (outputs.run, outputs.head, outputs.attempt):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise CannotStartError(f"{output} cannot be written: {error.strerror}. Choose another name with -o.") from None
    return outputs


def discard(recording: Path) -> None:
    """Deletes a recording, packed or not."""
    recording.unlink(missing_ok=True)
    shutil.rmtree(spool_of(recording), ignore_errors=True)


def _free_name(stem: str) -> Path:
    count = 1
    while (path := Path(f"{stem}{f'-{count}' if count > 1 else ''}.fit")).exists():
        count += 1
    return path
