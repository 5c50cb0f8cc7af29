"""The job's side of a spool: appends frames to one file.

It uses only the standard library, so that recording imports nothing into the job but torch.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import zlib
from array import array
from pathlib import Path
from typing import Any

from memprof.trace.files.private_file import FILE_MODE, FileSizeLimitError, file_size_limit, make_private_folder
from memprof.trace.files.spool import COLUMNS, FILE_NAME, FRAME_HEADER, FRAME_MAGIC

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

            limit = os.sysconf("SC_OPEN_MAX")  # the current soft limit, or -1 without one
            highest = min(limit, _HIGHEST_DESCRIPTOR) if limit > 0 else _HIGHEST_DESCRIPTOR
            high = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(highest - _HIGH_DESCRIPTORS, 0))
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
        return sys.maxsize if limit is None else max(0, limit - self._end - FRAME_HEADER.size - len(stream) - reserved)

    def _write(self, stream: str, payload: bytes, reserved: int = _REASON_BYTES) -> None:
        if len(payload) > self._room(stream, reserved):
            # Checked here: the system would send a signal, which ends a job that does not ignore it as Python does.
            raise FileSizeLimitError(file_size_limit() or 0)
        name = stream.encode()
        frame = FRAME_HEADER.pack(FRAME_MAGIC, len(name), len(payload), zlib.crc32(name + payload), 0) + name + payload
        view = memoryview(frame)
        file = self._descriptor()
        try:
            while view:
                view = view[os.write(file, view) :]
        except OSError:
            os.ftruncate(file, self._end)  # a full disk must not leave half a frame before later ones
            raise
        self._end += len(frame)
