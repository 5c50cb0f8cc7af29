"""The raw recording a job leaves behind: frames of integers, appended to one file per process.

The job's side (``SpoolWriter``) uses only the standard library, so that recording imports nothing into the
job but torch. One append-only file for all streams means that a recording cut anywhere (SIGKILL, a full disk)
is consistent up to its last whole frame. ``trace.assemble`` interprets the numbers afterwards.

A frame is a header (magic, length of the stream's name, length of the payload, CRC-32 of
both), the name and the
payload: int64 rows for the streams in ``COLUMNS``, JSON for every other.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memprof.trace.files.private_file import FILE_MODE, make_private_folder
from memprof.trace.files.size_limit import FileSizeLimitError, file_size_limit

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Version of the raw streams. A spool is readable by the version that wrote it and later ones.
SPOOL_VERSION = 1

FILE_NAME = "recording.spool"

#: Streams of int64 rows and their columns. Times are Unix nanoseconds.
COLUMNS: dict[str, tuple[str, ...]] = {
    # One row per operator seen. `sequence` is autograd's counter while it ran, `node_sequence` that of the backward
    # node running (-1 outside backward, -2 for the accumulation of a gradient, whose module is then `module`).
    "operators": (
        "start_ns",
        "end_ns",
        "name",
        "sequence",
        "node_sequence",
        "module",
        "phase",
        "flags",
        "call",
        "stack",
        "flops",
        "read_bytes",
        "written_bytes",
        "micro_batch",
    ),
    # One row per operator and tensor it uses.
    "touches": ("op", "address", "size_bytes", "role", "tensor"),
    # One row per allocation (size > 0) or free (size < 0). `total` is the allocator's own count afterwards, or -1.
    "events": ("time_ns", "address", "size_bytes", "total"),
    # One row per module call, written when it ends.
    "calls": ("call", "module", "parent", "first_op", "end_op", "enter_ns", "exit_ns", "flags"),
    # One row per block known to be alive when an epoch of the recording begins.
    "alive": ("time_ns", "address", "size_bytes"),
    # A fact about the memory at an address at a given time.
    "facts": ("time_ns", "address", "size_bytes", "category", "name", "module", "tensor"),
    # Operators of the timed step, parents before children.
    "times": ("name", "start_ns", "duration_ns", "depth"),
    # Resident memory of the process.
    "rss": ("time_ns", "op", "rss_bytes"),
    # Light recordings: where the job is from a given time on. `sequence` is autograd's counter then.
    "marks": ("time_ns", "module", "phase", "call", "sequence"),
    # Light recordings: backward nodes that ran.
    "nodes": ("start_ns", "end_ns", "sequence", "name"),
    # Light recordings: the peak of a step and where it was; where a step has several rows, the last one counts.
    # `how` is an index into schema.PEAK_SOURCES; `phase_now` and `module_now` give the job's position when written.
    "step_peaks": (
        "step",
        "start_ns",
        "end_ns",
        "is_complete",
        "updates",
        "phase",
        "module",
        "allocated_bytes",
        "reserved_bytes",
        "how",
        "phase_now",
        "module_now",
    ),
    # Light recordings: counts that are the highest so far in their phase and module.
    "module_peaks": ("phase", "module", "step", "allocated_bytes"),
    # One row per allocation (size > 0) or free (size < 0) on a device other than the CPU; `device` is an index into
    # the `devices` texts, `total` and `reserved` are its allocator's own counts afterwards, or -1.
    "device_events": ("time_ns", "device", "address", "size_bytes", "total", "reserved"),
    # One row per block of a device's allocator in use when an epoch begins.
    "device_alive": ("time_ns", "device", "address", "size_bytes", "requested_bytes", "stream", "is_pending"),
    # One row per entry of a device allocator's own history; `action` is an index into schema.ACTIONS.
    "history": ("time_us", "device", "action", "address", "size_bytes", "stream", "pool"),
    # Work on a device that operators of the timed step started; `row` counts the rows of `times`.
    "kernels": ("row", "device_ns"),
    # One row per switch of operators to another stream.
    "streams": ("op", "stream"),
    # The device driver's figures for the whole device, and torch's own share of them.
    "device_memory": (
        "time_ns",
        "device",
        "total_bytes",
        "used_bytes",
        "process_bytes",
        "reserved_bytes",
        "pinned_bytes",
    ),
}

#: Light recordings: folder of the whole run's records, name prefix of the ring's folders, and the
#: streams that go there.
LIGHT_FOLDER = "light"
RING_PREFIX = "ring-"
RING_STREAMS = ("events", "alive", "facts", "calls", "marks", "nodes")
#: Light recordings of CUDA jobs: the allocator's snapshots.
SNAPSHOT_AT_END, SNAPSHOT_AT_FAILURE = "snapshot-end.pickle", "snapshot-failure.pickle"

#: An `events` row (without its time) that is not an event: all events up to its time have been recorded.
HEARD = (0, 0, -1)

#: Source of the memory events of a dry run, and name of its backend: nothing was computed.
DRY_RUN = "dry-run"

#: Added to the `sequence` of operators that another thread's counter numbers (a device's backward that repeats a
#: forward), and to the `node_sequence` of nodes that were created there.
OTHER_THREAD = 2**40

#: Start of the note on the step whose inputs were larger than those of all recorded steps.
MISSED_STEP = "not recorded: "

#: Mark of a job that has an optimizer and called models only without gradients: its recording never began.
UNTRAINED = "untrained"

#: Start of the note that nothing of a job was placed on the virtual GPU that it was dry-run on.
UNUSED_DEVICE = "the job allocated nothing on the virtual device"

# Flags of the `operators` stream.
FLAG_GRAD_ENABLED = 1
FLAG_RNG = 2
FLAG_MUTATES = 4
FLAG_RECOMPUTE = 8
FLAG_VIEW = 16
FLAG_COPY = 32
FLAG_COLLECTIVE = 64
FLAG_IN_CLOSURE = 128  # within an update, after a forward that it called, without gradients
FLAG_EVAL_MODE = 256  # after a call of a trained model in evaluation mode, with gradients on
#: From this bit on: 1 plus the index, in the texts `phases`, of the job's own name for the phase; 0 without.
NAME_SHIFT = 16
# Flag of the `calls` stream.
FLAG_CALL_RECOMPUTE = 1
# Phase codes are indices into schema.PHASES; in light recordings, the job's own names (texts `phases`) follow.
FORWARD, BACKWARD, OPTIMIZER, OTHER, EVALUATION, SAVING, LOADING = range(7)
# Role codes are indices into schema.ROLES.
READ, WRITE, MUTATE = range(3)
# Category codes of the `facts` stream. HELD: a tensor that Python held when the recording began, purpose unknown.
PARAMETER, BUFFER, GRADIENT, OPTIMIZER_STATE, INPUT, ACTIVATION, HELD = range(7)

_MAGIC = b"MPF1"
_HEADER = struct.Struct("<4sHIIH")  # magic, name length, payload length, payload crc, reserved


#: The recording's descriptor is below this number, near the top of the range the job may use.
_HIGHEST_DESCRIPTOR = 1024
_HIGH_DESCRIPTORS = 16

#: Bytes reserved, out of the file size limit, for the reason why the recording ends.
_REASON_BYTES = 512


class SpoolWriter:
    """Appends frames to a process's recording.

    Every frame is written to the operating system in one call, so a killed process loses at most the current frame.

    The job shares the descriptor table. The recording uses a high descriptor number, so the job's own files get the
    numbers that they would have without it. A job may close every descriptor, as a daemon does, and open its own files
    under the same numbers: before each write the descriptor is compared with the file, and the file is reopened if it
    differs.
    """

    def __init__(self, folder: str | os.PathLike[str], *, is_new: bool = True) -> None:
        """Opens a recording for writing.

        Args:
            folder: The process's folder.
            is_new: Create the folder and its recording file, which must not exist; else append to the file.

        Raises:
            OSError: The folder or file cannot be created, or does not exist.
        """
        self.folder = Path(folder)
        if is_new:
            make_private_folder(self.folder)
        self._file = self._open(os.O_CREAT | os.O_EXCL if is_new else 0)
        status = os.fstat(self._file)
        self._identity = status.st_dev, status.st_ino
        self._end = status.st_size

    def write_rows(self, stream: str, rows: array[int]) -> None:
        """Appends int64 rows, in sequence, to a stream named in ``COLUMNS``."""
        if len(rows) % len(COLUMNS[stream]):
            raise ValueError(f"{len(rows)} values do not make whole rows of stream {stream}")
        if rows:
            payload = rows.tobytes()
            try:
                self._write(stream, payload)
            except FileSizeLimitError:
                width = rows.itemsize * len(COLUMNS[stream])
                if fitting := self._room(stream) // width * width:
                    self._write(stream, payload[:fitting])
                raise

    def write_record(self, stream: str, record: Any) -> None:
        """Appends one JSON record to a stream of records."""
        self._write(stream, json.dumps(record, separators=(",", ":")).encode())

    def write_reason(self, fault: str) -> None:
        """Appends why the recording ends, using the space reserved for it under a file size limit."""
        self._write("faults", json.dumps(fault).encode(), reserved=0)

    def close(self) -> None:
        """Closes the file; the writer cannot be used again."""
        if self._is_ours():
            os.close(self._file)
        self._file = -1

    def _open(self, flags: int) -> int:
        """Opens the file under a descriptor number that the job's own files do not reach, if one is free."""
        file = os.open(self.folder / FILE_NAME, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, FILE_MODE)
        try:
            import fcntl  # imported on use: recordings are also read on systems without it

            high = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _first_high_descriptor())
        except (ImportError, OSError):  # the job has reached its descriptor limit
            return file
        os.close(file)
        return high

    def _is_ours(self) -> bool:
        """Whether the descriptor is still the recording's."""
        try:
            status = os.fstat(self._file)
        except OSError:
            return False  # closed, by the job or by `close`
        return (status.st_dev, status.st_ino) == self._identity

    def _descriptor(self) -> int:
        """Returns the descriptor to write to, reopening the file if the job closed it.

        Raises:
            OSError: The file is gone, cannot be opened again, or the writer was closed.
        """
        if self._file < 0:
            raise OSError(errno.EBADF, "the recording is closed", str(self.folder))
        if not self._is_ours():
            self._file = self._open(0)
            # The number of a removed file is soon reused by another.
            if not self._is_ours() or os.fstat(self._file).st_size != self._end:
                os.close(self._file)
                self._file = -1
                raise FileNotFoundError(errno.ENOENT, "the recording was replaced by another file", str(self.folder))
        return self._file

    def _room(self, stream: str, reserved: int = _REASON_BYTES) -> int:
        """Returns how many payload bytes a frame of a stream may still have."""
        limit = file_size_limit()
        return sys.maxsize if limit is None else max(0, limit - self._end - _HEADER.size - len(stream) - reserved)

    def _write(self, stream: str, payload: bytes, reserved: int = _REASON_BYTES) -> None:
        if len(payload) > self._room(stream, reserved):
            # Checked here: the system would send a signal, which ends a job that does not ignore it as Python does.
            raise FileSizeLimitError(file_size_limit() or 0)
        name = stream.encode()
        frame = _HEADER.pack(_MAGIC, len(name), len(payload), zlib.crc32(name + payload), 0) + name + payload
        view = memoryview(frame)
        file = self._descriptor()
        try:
            while view:
                view = view[os.write(file, view) :]
        except OSError:
            os.ftruncate(file, self._end)  # a full disk must not leave half a frame before later ones
            raise
        self._end += len(frame)


def _first_high_descriptor() -> int:
    """Returns where to start looking for a descriptor number for the recording."""
    limit = os.sysconf("SC_OPEN_MAX")  # the current soft limit, or -1 without one
    return (
        max(min(limit, _HIGHEST_DESCRIPTOR) if limit > 0 else _HIGHEST_DESCRIPTOR, _HIGH_DESCRIPTORS)
        - _HIGH_DESCRIPTORS
    )


@dataclass
class Spool:
    """A process's raw recording, read from its file.

    Attributes:
        rows: Stream name to an int64 array of shape [rows, columns].
        records: Stream name to its JSON records, in order.
        is_whole: False when the file ends inside a frame.
    """

    rows: dict[str, npt.NDArray[np.int64]] = field(default_factory=dict)
    records: dict[str, list[Any]] = field(default_factory=dict)
    is_whole: bool = True

    def columns(self, stream: str) -> dict[str, npt.NDArray[np.int64]]:
        """Returns a stream's columns by name."""
        return {name: self.rows[stream][:, i] for i, name in enumerate(COLUMNS[stream])}


def read_spool(folder: str | os.PathLike[str]) -> Spool:
    """Reads a process's recording up to its last whole frame.

    Raises:
        OSError: There is no recording to read.
    """
    import numpy as np

    from memprof.trace.files.reading import refuse_special  # not needed in the job

    path = Path(folder) / FILE_NAME
    refuse_special(path)
    data = path.read_bytes()
    chunks: dict[str, list[npt.NDArray[np.int64]]] = {name: [] for name in COLUMNS}
    spool = Spool()
    whole = 0
    for stream, payload, end in _frames(data):
        whole = end
        if stream in COLUMNS:
            width = len(COLUMNS[stream])
            chunks[stream].append(np.frombuffer(payload, dtype="<i8").reshape(-1, width))
        else:
            spool.records.setdefault(stream, []).append(json.loads(payload))
    spool.is_whole = whole == len(data)
    for stream, parts in chunks.items():
        width = len(COLUMNS[stream])
        spool.rows[stream] = np.concatenate(parts) if parts else np.empty((0, width), dtype=np.int64)
    return spool


def peek_spool(folder: str | os.PathLike[str]) -> tuple[dict[str, Any] | None, bool]:
    """Inspects a process's recording without reading all of it.

    Returns:
        The first record, None where there is none, and whether any operator was recorded.
    """
    start: dict[str, Any] | None = None
    try:
        with (Path(folder) / FILE_NAME).open("rb") as file:
            while len(header := file.read(_HEADER.size)) == _HEADER.size:
                magic, name_length, length, _, _ = _HEADER.unpack(header)
                name = file.read(name_length)
                if magic != _MAGIC or name == b"operators":
                    return start, magic == _MAGIC
                if name == b"start" and start is None:
                    start = json.loads(file.read(length))
                else:
                    file.seek(length, os.SEEK_CUR)
    except (OSError, ValueError):
        return start, False
    return start, False


def _frames(data: bytes) -> Iterator[tuple[str, bytes, int]]:
    position = 0
    while position + _HEADER.size <= len(data):
        magic, name_length, length, checksum, _ = _HEADER.unpack_from(data, position)
        start = position + _HEADER.size + name_length
        payload = data[start : start + length]
        whole = data[start - name_length : start + length]
        if magic != _MAGIC or len(payload) < length or zlib.crc32(whole) != checksum:
            return
        position = start + length
        yield data[start - name_length : start].decode(), payload, position
