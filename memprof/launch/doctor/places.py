"""Whether recordings can be written here, and how much space is available."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from memprof.launch.doctor.findings import FAIL, FIX, NOTE, OK, Finding
from memprof.machines.host_limits import nearest_limit
from memprof.units import format_bytes

#: Size of the test file in bytes: more than file systems reserve.
_TRIED_BYTES = 1 << 20
#: A window of a large model's steps takes a few hundred megabytes while recording.
_LITTLE_DISK_BYTES = 1 << 30
#: Shared memory below this is little: gloo, NCCL and data loader workers usually need less.
_LITTLE_SHARED_BYTES = 256 << 20
SHARED = Path("/dev/shm")


def check_output(folder: Path) -> Finding:
    """Writes a test file to the output folder, and removes it.

    Args:
        folder: The folder of the output file.
    """
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".memprof-doctor-", dir=folder) as tried,
            (Path(tried) / "spool").open("wb") as file,
        ):
            file.write(bytes(_TRIED_BYTES))
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(
            FAIL,
            "recordings",
            f"nothing can be written to {folder} ({error.strerror or error})",
            "Free some space there, change to a folder that can be written, or choose another with -o.",
        )
    return judge_disk(folder, free)


def judge_disk(folder: Path, free_bytes: int) -> Finding:
    """Judges the free space of a writable folder."""
    says = f"{folder} can be written, {format_bytes(free_bytes)} free"
    if free_bytes < _LITTLE_DISK_BYTES:
        return Finding(FIX, "recordings", says, "Free some space: a long window of a large job takes a gigabyte.")
    return Finding(OK, "recordings", says)


def check_shared_memory(folder: Path = SHARED) -> Finding:
    """Checks shared memory: ranks and data loader workers need it, memprof does not."""
    if not folder.is_dir():
        return Finding(NOTE, str(folder), "missing: data loader workers and ranks of one machine may need it")
    if not os.access(folder, os.W_OK):
        return Finding(
            FIX, str(folder), "cannot be written", "Data loader workers and ranks of one machine need it: mount it rw."
        )
    free = shutil.disk_usage(folder).free
    says = f"{format_bytes(free)} free, for data loader workers and ranks of one machine"
    if free < _LITTLE_SHARED_BYTES:
        return Finding(FIX, str(folder), says, "Enlarge it; in a container: --shm-size=1g, or --ipc=host.")
    return Finding(OK, str(folder), says)


def check_host() -> Finding:
    """Returns how much host memory a job can use, by the tightest limit."""
    limit = nearest_limit()
    if limit is None:
        return Finding(NOTE, "host memory", "not reported by the system")
    free, total = format_bytes(limit.free_bytes), format_bytes(limit.total_bytes)
    return Finding(OK, "host memory", f"{free} free of the {total} available to a process here")
