"""The snapshots that the job itself takes in a dry run: ``torch.cuda.memory._snapshot`` and ``_dump_snapshot``."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memprof.recorder.steps.window import end_job
from memprof.trace.files.private_file import open_private
from memprof.virtual.device.job_history import JobHistory

#: A key of the snapshots that a dry run writes; torch's own viewer ignores it.
DRY_RUN_KEY = "memprof_dry_run"
_TAIL_BYTES = 4096


@dataclass(frozen=True)
class SnapshotRequest:
    """Snapshots that are collected instead of being written where the job says.

    Attributes:
        folder: Folder for them.
        name: Name of the file whose writing ends the job; "" if no name does.
    """

    folder: Path
    name: str = ""


class JobSnapshots:
    """Writes the job's snapshots, and ends the job once it has them, if its recording is over."""

    def __init__(
        self,
        history: JobHistory,
        device: str,
        note: Callable[[str], None],
        request: SnapshotRequest | None = None,
    ) -> None:
        """Changes nothing yet.

        Args:
            history: The job's history.
            device: Name of the simulated device.
            note: Called with a note for the reader of the recording.
            request: Where snapshots are collected; None to write them where the job says.
        """
        self._history = history
        self._device = device
        self._note = note
        self._request = request
        self._end: Callable[[], None] | None = None if request is None else end_job
        self._has_all = False
        self._taken = 0

    def functions(self) -> dict[str, Callable[..., Any]]:
        """Returns replacements for functions of ``torch.cuda.memory`` by name."""
        return {"_snapshot": self._snapshot, "_dump_snapshot": self._dump}

    def postpones(self, end: Callable[[], None]) -> bool:
        """Returns whether the job must go on after its recording; `end` is then called once it has its snapshots."""
        self._end = end
        return self._history.is_awaited or (self._request is not None and not self._has_all)

    def end_if_complete(self) -> None:
        """Ends the job if it has its snapshots, and its recording is over; not instead of an out-of-memory error."""
        if self._has_all and self._end is not None and not self._history.is_failing:
            self._end()

    def _take(self, *, augments: bool) -> dict[str, Any]:
        snapshot: dict[str, Any] = torch._C._cuda_memorySnapshot(None)
        if augments:
            memory: Any = torch.cuda.memory
            snapshot = memory._augment_memory_snapshot_stack_traces(snapshot)
        self._history.is_awaited = False
        snapshot[DRY_RUN_KEY] = {"device": self._device, "torch": str(torch.__version__)}
        return snapshot

    def _snapshot(self, device: Any = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
        snapshot = self._take(augments=augment_with_fx_traces)
        if self._request is not None:
            self._collect(self._request.folder, "snapshot.pickle", snapshot)
        self._has_all = True
        return snapshot

    def _dump(self, filename: Any = "dump_snapshot.pickle", augment_with_fx_traces: bool = False) -> None:
        snapshot = self._take(augments=augment_with_fx_traces)
        path = Path(os.fspath(filename))
        if self._request is not None:
            self._collect(self._request.folder, path.name, snapshot)
            self._has_all = self._request.name in ("", path.name)
        else:
            with self._free_path(path).open("wb") as file:
                pickle.dump(snapshot, file)
            self._has_all = True
        self.end_if_complete()

    def _collect(self, folder: Path, name: str, snapshot: dict[str, Any]) -> None:
        with open_private(folder / f"{self._taken:04d}-{name}", "xb") as file:
            pickle.dump(snapshot, file)
        self._taken += 1

    def _free_path(self, path: Path) -> Path:
        """Returns where to write: beside a file that no dry run wrote, which may be that of a real GPU."""
        if not path.is_file() or _is_of_dry_run(path):
            return path
        beside = path.with_name(f"{path.stem}.dry-run{path.suffix}")
        self._note(f"the job's snapshot was written as {beside.name}: {path.name} is not from a dry run, and was kept")
        return beside


def _is_of_dry_run(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        return DRY_RUN_KEY.encode() in file.read()
