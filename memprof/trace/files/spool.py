"""The raw recording a job leaves behind: frames of plain numbers, appended to one file a process.

The job's side (``SpoolWriter``) uses only the standard library, so that recording imports nothing into the
job but torch. One append-only file for all streams means that a recording cut anywhere (SIGKILL, a full disk)
is consistent up to its last whole frame. What the numbers mean is worked out afterwards by ``trace.assemble``.

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

#: Version of the raw streams. A spool is read by the version that wrote it, or a later one.
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
    # One row per operator and tensor it touches.
    "touches": ("op", "address", "size_bytes", "role", "tensor"),
    # One row per allocation (size > 0) or free (size < 0). `total` is the allocator's own count afterwards, or -1.
    "events": ("time_ns", "address", "size_bytes", "total"),
    # One row per module call, written when it ends.
    "calls": ("call", "module", "parent", "first_op", "end_op", "enter_ns", "exit_ns", "flags"),
    # One row per block known to be alive when an epoch of the recording begins.
    "alive": ("time_ns", "address", "size_bytes"),
    # What is known of the memory at an address at a moment.
    "facts": ("time_ns", "address", "size_bytes", "category", "name", "module", "tensor"),
    # Operators of the timed step, parents before children.
    "times": ("name", "start_ns", "duration_ns", "depth"),
    # Resident memory of the process.
    "rss": ("time_ns", "op", "rss_bytes"),
    # Of a light recording: where the job is from a moment on. `sequence` is autograd's counter then.
    "marks": ("time_ns", "module", "phase", "call", "sequence"),
    # Of a light recording: backward nodes that ran.
    "nodes": ("start_ns", "end_ns", "sequence", "name"),
    # Of a light recording: the highest count of a step and where it was; of several rows of a step the last one counts.
    # `how` is a position in schema.PEAK_SOURCES; `phase_now` and `module_now` say where the job was by then.
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
    # Of a light recording: counts that are the highest so far in their phase and module.
    "module_peaks": ("phase", "module", "step", "allocated_bytes"),
    # One row per allocation (size > 0) or free (size < 0) on a device other than the processor; `device` is a number of
    # the `devices` texts, `total` and `reserved` are its allocator's own counts afterwards, or -1.
    "device_events": ("time_ns", "device", "address", "size_bytes", "total", "reserved"),
    # One row per block of a device's allocator in use when an epoch begins.
    "device_alive": ("time_ns", "device", "address", "size_bytes", "requested_bytes", "stream", "is_pending"),
    # One row per entry of a device allocator's own history; `action` is a position in schema.ACTIONS.
    "history": ("time_us", "device", "action", "address", "size_bytes", "stream", "pool"),
    # Work on a device that operators of the timed step started; `row` counts the rows of `times`.
    "kernels": ("row", "device_ns"),
    # One row wherever operators begin to run on another stream.
    "streams": ("op", "stream"),
    # What a device's driver says of the whole device, beside what torch holds of it.
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

#: A light recording: folder of what is told of the whole run, beginning of the names of the ring's folders, and the
#: streams that go there.
LIGHT_FOLDER = "light"
RING_PREFIX = "ring-"
RING_STREAMS = ("events", "alive", "facts", "calls", "marks", "nodes")
#: And of a job on CUDA: its allocator's snapshots.
SNAPSHOT_AT_END, SNAPSHOT_AT_FAILURE = "snapshot-end.pickle", "snapshot-failure.pickle"

#: An `events` row (without its time) that is no event: everything up to its time has been heard.
HEARD = (0, 0, -1)

#: Source of the memory events of a dry run, and name of its backend: nothing was computed.
DRY_RUN = "dry-run"

#: Added to the `sequence` of operators that another thread's counter numbers (a device's backward that repeats a
#: forward), and to the `node_sequence` of nodes that were made there.
OTHER_THREAD = 2**40

#: Beginning of the note on the step whose inputs were larger than those of all recorded ones.
MISSED_STEP = "not recorded: "

# Flags of the `operators` stream.
FLAG_GRAD_ENABLED = 1
FLAG_RNG = 2
FLAG_MUTATES = 4
FLAG_RECOMPUTE = 8
FLAG_VIEW = 16
FLAG_COPY = 32
FLAG_COLLECTIVE = 64
FLAG_IN_CLOSURE = 128  # within an update, behind a forward that it called, without gradients
FLAG_EVAL_MODE = 256  # behind a call of a trained model in evaluation mode, with gradients on
#: From this bit on: 1 and the number, among the texts `phases`, of the job's own name for what it runs; 0 without.
NAME_SHIFT = 16
# Flag of the `calls` stream.
FLAG_CALL_RECOMPUTE = 1
# Phase codes are positions in schema.PHASES; in light recordings, the job's own names (texts `phases`) follow.
FORWARD, BACKWARD, OPTIMIZER, OTHER, EVALUATION, SAVING, LOADING = range(7)
# Role codes are positions in schema.ROLES.
READ, WRITE, MUTATE = range(3)
# Category codes of the `facts` stream. HELD: a tensor that Python held when the recording began, purpose unknown.
PARAMETER, BUFFER, GRADIENT, OPTIMIZER_STATE, INPUT, ACTIVATION, HELD = range(7)

_MAGIC = b"MPF1"
_HEADER = struct.Struct("<4sHIIH")  # magic, name length, payload length, payload crc, reserved


#: Below this number is the recording's descriptor, among the last few of those that the job may have.
_HIGHEST_DESCRIPTOR = 1024
_HIGH_DESCRIPTORS = 16

#: Of the size that the file may have, what is left for the reason why it ends there.
_REASON_BYTES = 512


class SpoolWriter:
    """Appends frames to a process's recording.

    Every frame goes to the operating system in one write, so a killed process loses at most the frame under way.

    The job shares the table of descriptors. Its own files get the numbers that they would have without the
    recording, whose descriptor is a high one. A job may close all that it finds, as a daemon does, and open files of
    its own under the same numbers: before each write the descriptor is compared with the file, and the file is opened
    again where it is another.
    """

    def __init__(self, folder: str | os.PathLike[str], *, is_new: bool = True) -> None:
        """Opens a recording to write to.

        Args:
            folder: The process's folder.
            is_new: Create the folder and its recording file, which may not be there yet; else add to the file.

        Raises:
            OSError: The folder or file cannot be made, or is not there.
        """
        self.folder = Path(folder)
        if is_new:
            make_private_folder(self.folder)
        self._file = self._open(os.O_CREAT | os.O_EXCL if is_new else 0)
        status = os.fstat(self._file)
        self._identity = status.st_dev, status.st_ino
        self._end = status.st_size

    def write_rows(self, stream: str, rows: array[int]) -> None:
        """Appends int64 rows, one after the other, to a stream named in ``COLUMNS``."""
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
        """Appends why the recording ends, for which room is left where the size of files is limited."""
        self._write("faults", json.dumps(fault).encode(), reserved=0)

    def close(self) -> None:
        """Closes the file; the writer cannot be used again."""
        if self._is_ours():
            os.close(self._file)
        self._file = -1

    def _open(self, flags: int) -> int:
        """Opens the file under a number that the job's own files do not reach, where one is free."""
        file = os.open(self.folder / FILE_NAME, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, FILE_MODE)
        try:
            import fcntl  # at use: recordings are read on systems without it

            high = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _first_high_descriptor())
        except (ImportError, OSError):  # the job may have no more open than it has
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
        """Returns the descriptor to write to, a new one where the job has closed the old.

        Raises:
            OSError: The file is gone, cannot be opened again, or the writer was closed.
        """
        if self._file < 0:
            raise OSError(errno.EBADF, "the recording is closed", str(self.folder))
        if not self._is_ours():
            self._file = self._open(0)
            # The number of a file that was removed is another's soon.
            if not self._is_ours() or os.fstat(self._file).st_size != self._end:
                os.close(self._file)
                self._file = -1
                raise FileNotFoundError(errno.ENOENT, "the recording was replaced by another file", str(self.folder))
        return self._file

    def _room(self, stream: str, reserved: int = _REASON_BYTES) -> int:
        """Returns how many bytes of payload a frame of a stream may still have."""
        limit = file_size_limit()
        return sys.maxsize if limit is None else max(0, limit - self._end - _HEADER.size - len(stream) - reserved)

    def _write(self, stream: str, payload: bytes, reserved: int = _REASON_BYTES) -> None:
        if len(payload) > self._room(stream, reserved):
            # Not left to the system, which sends a signal: it ends a job that does not ignore it as Python does.
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
    """Returns from where on to look for a number for the recording's descriptor."""
    limit = os.sysconf("SC_OPEN_MAX")  # the soft limit as it is now, or -1 without one
    return (
        max(min(limit, _HIGHEST_DESCRIPTOR) if limit > 0 else _HIGHEST_DESCRIPTOR, _HIGH_DESCRIPTORS)
        - _HIGH_DESCRIPTORS
    )


@dataclass
class Spool:
    """A process's raw recording, read back.

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

    from memprof.trace.files.reading import refuse_special  # of no use to the job

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
    """Looks into a process's recording without reading it.

    Returns:
        The record that it starts with, None where there is none, and whether any operator was recorded.
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
