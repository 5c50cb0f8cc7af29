"""The raw recording: what is written is read back, whatever cuts it short."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.trace.files.spool import COLUMNS, FILE_NAME, Spool, read_spool
from memprof.trace.files.spool_writer import SpoolWriter

#: What `write_frames` writes, frame by frame: the stream, and its rows or its record.
FRAMES: list[tuple[str, Any]] = [
    ("start", {"pid": 7}),
    ("names", ["aten.mm.default", "größer"]),
    ("events", [[11, 4096, 64, 64], [12, 4096, -64, 0]]),
    ("alive", [[10, 8192, 2**40]]),
    ("events", [[13, 2**62, 1, -1]]),
    ("end", {"reason": "the job ended"}),
]


def write_frames(folder: Path) -> list[int]:
    """Writes FRAMES; returns the length of the file after each."""
    writer = SpoolWriter(folder)
    ends = []
    for stream, content in FRAMES:
        write(writer, stream, content)
        ends.append((folder / FILE_NAME).stat().st_size)
    writer.close()
    return ends


def write(writer: SpoolWriter, stream: str, content: Any) -> None:
    if stream in COLUMNS:
        writer.write_rows(stream, array("q", [number for row in content for number in row]))
    else:
        writer.write_record(stream, content)


def holds(spool: Spool, frames: int) -> bool:
    """Returns whether a spool contains exactly the first ``frames`` FRAMES."""
    records: dict[str, list[Any]] = {}
    rows: dict[str, list[list[int]]] = {stream: [] for stream in COLUMNS}
    for stream, content in FRAMES[:frames]:
        if stream in COLUMNS:
            rows[stream] += content
        else:
            records.setdefault(stream, []).append(content)
    return records == spool.records and rows == {stream: read.tolist() for stream, read in spool.rows.items()}


def test_frames_are_read_back(tmp_path: Path) -> None:
    """Rows and records come back as written, in order, streams without rows as empty tables of their width."""
    write_frames(tmp_path)
    spool = read_spool(tmp_path)
    assert spool.is_whole
    assert holds(spool, len(FRAMES))
    assert spool.columns("events")["size_bytes"].tolist() == [64, -64, 1]
    assert spool.rows["operators"].shape == (0, 14)
    assert all(read.dtype == np.int64 for read in spool.rows.values())


def test_a_recording_cut_anywhere_holds_the_frames_before(tmp_path: Path) -> None:
    """Truncated at any byte, as by SIGKILL or a full disk, complete frames are read and the truncation is reported."""
    ends = write_frames(tmp_path)
    data = (tmp_path / FILE_NAME).read_bytes()
    for length in range(len(data)):
        (tmp_path / FILE_NAME).write_bytes(data[:length])
        spool = read_spool(tmp_path)
        assert holds(spool, sum(end <= length for end in ends)), length
        assert spool.is_whole == (length in {0, *ends}), length


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_reading_stops_before_a_damaged_frame(tmp_path: Path, mask: int) -> None:
    """Whichever byte is damaged, the frames before it are read and nothing wrong, unless the byte means nothing."""
    ends = write_frames(tmp_path)
    data = (tmp_path / FILE_NAME).read_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= mask
        (tmp_path / FILE_NAME).write_bytes(damaged)
        spool = read_spool(tmp_path)
        before = sum(end <= position for end in ends)
        begin = [0, *ends][before]
        is_reserved = position - begin in {14, 15}  # behind magic (4), name length (2), length (4) and checksum (4)
        assert holds(spool, len(FRAMES) if is_reserved else before), position
        assert spool.is_whole == is_reserved


def test_an_empty_recording_is_read_as_nothing(tmp_path: Path) -> None:
    """A process killed before its first frame leaves a recording without anything, not an error."""
    SpoolWriter(tmp_path).close()
    spool = read_spool(tmp_path)
    assert spool.is_whole
    assert holds(spool, 0)


def test_a_missing_recording_is_an_error(tmp_path: Path) -> None:
    """A folder without a recording is distinguished from an empty recording."""
    with pytest.raises(FileNotFoundError):
        read_spool(tmp_path)


def test_a_recording_is_not_written_over(tmp_path: Path) -> None:
    """A second writer on the same folder is refused, and what the first wrote stays."""
    write_frames(tmp_path)
    with pytest.raises(FileExistsError):
        SpoolWriter(tmp_path)
    assert holds(read_spool(tmp_path), len(FRAMES))


def test_only_whole_rows_are_written(tmp_path: Path) -> None:
    """Numbers that do not fill whole rows are refused, and leave nothing in the file; no rows leave nothing too."""
    writer = SpoolWriter(tmp_path)
    with pytest.raises(ValueError, match="5 values do not make whole rows of stream events"):
        writer.write_rows("events", array("q", [1, 2, 3, 4, 5]))
    writer.write_rows("events", array("q"))
    assert (tmp_path / FILE_NAME).read_bytes() == b""


def descriptors_of(path: Path) -> list[int]:
    """Lists this process's descriptors of a file."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one of the listing itself is closed by now
            if os.path.samestat(os.fstat(int(entry.name)), path.stat()):
                found.append(int(entry.name))
    return found


def test_the_job_may_close_every_descriptor(tmp_path: Path) -> None:
    """What is written afterwards goes to the recording, and nothing to the job's file of the same number."""
    writer = SpoolWriter(tmp_path / "recording")
    write(writer, *FRAMES[0])
    (number,) = descriptors_of(tmp_path / "recording" / FILE_NAME)
    own = os.open(tmp_path / "own.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(own, number)
    write(writer, *FRAMES[1])
    writer.close()
    assert (tmp_path / "own.txt").read_bytes() == b""
    assert os.write(number, b"mine") == 4
    os.close(number)
    os.close(own)
    assert holds(read_spool(tmp_path / "recording"), 2)


def test_closing_leaves_a_descriptor_that_is_the_jobs(tmp_path: Path) -> None:
    """A writer whose descriptor the job took closes nothing, and is closed all the same."""
    writer = SpoolWriter(tmp_path / "recording")
    (number,) = descriptors_of(tmp_path / "recording" / FILE_NAME)
    own = os.open(tmp_path / "own.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(own, number)
    writer.close()
    assert os.write(number, b"mine") == 4
    os.close(number)
    os.close(own)
    with pytest.raises(OSError, match="closed"):
        write(writer, *FRAMES[0])


def test_a_recording_that_was_replaced_is_not_written_to(tmp_path: Path) -> None:
    """Where the job closed the descriptor and another file has the recording's name, that file stays as it is."""
    writer = SpoolWriter(tmp_path)
    (number,) = descriptors_of(tmp_path / FILE_NAME)
    os.close(number)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).write_bytes(b"theirs")
    with pytest.raises(FileNotFoundError, match="replaced"):
        write(writer, *FRAMES[0])
    assert (tmp_path / FILE_NAME).read_bytes() == b"theirs"


def test_the_jobs_descriptors_have_the_numbers_they_would_have(tmp_path: Path) -> None:
    """The first number that was free before a recording is free while it goes on."""
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    writer = SpoolWriter(tmp_path)
    again = os.open(os.devnull, os.O_RDONLY)
    os.close(again)
    writer.close()
    assert again == free


@pytest.mark.parametrize("written", [0, 1, 17, 40])
def test_a_full_disk_leaves_whole_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    """A write that fails half-way raises and is reverted: frames before and after it are read."""
    writer = SpoolWriter(tmp_path)
    write(writer, *FRAMES[0])
    real_write = os.write
    room = written

    def write_until_full(file: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = real_write(file, bytes(data)[:room])
        room -= done
        return done

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_until_full)
        with pytest.raises(OSError, match="No space left"):
            write(writer, *FRAMES[2])
    assert holds(read_spool(tmp_path), 1)
    write(writer, *FRAMES[1])
    spool = read_spool(tmp_path)
    assert spool.is_whole
    assert holds(spool, 2)


def test_a_limit_on_the_files_size_leaves_whole_frames(tmp_path: Path) -> None:
    """Against a real limit of the system, in a job of its own: OSError, and all frames that fitted are there."""
    script = f"""
import resource
from array import array
from memprof.trace.files.spool_writer import SpoolWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (1512, 1512))
writer = SpoolWriter({str(tmp_path)!r})
written = 0
try:
    while True:
        writer.write_rows("alive", array("q", [written, written, written]))
        written += 1
except OSError as error:
    print(written, error.errno)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # A frame is a header of 16 bytes (4 + 2 + 4 + 4 + 2), 5 of the name and 3 numbers of 8: 45 bytes, 22 in 1000. The
    # last 512 bytes are left for the reason.
    assert done.stdout.split() == ["22", str(errno.EFBIG)]
    spool = read_spool(tmp_path)
    assert spool.is_whole
    assert spool.rows["alive"].tolist() == [[number] * 3 for number in range(22)]


def test_within_a_limit_on_the_files_size_the_rows_that_fit_are_kept(tmp_path: Path) -> None:
    """Of rows written together as many as fit, no signal of the system is sent, and the reason has room after them."""
    script = f"""
import resource, signal
from array import array
from memprof.trace.files.spool_writer import SpoolWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (1512, 1512))
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
writer = SpoolWriter({str(tmp_path)!r})
try:
    writer.write_rows("alive", array("q", range(300)))
except OSError as error:
    print(error)
    writer.write_reason("x" * 400)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("the file size limit of this shell (ulimit -f, 1.48 KiB) ended the recording; raise")
    spool = read_spool(tmp_path)
    # Of 1000 bytes, 16 and 5 are the frame's: 40 rows of 24.
    assert spool.rows["alive"].ravel().tolist() == list(range(120))
    assert spool.records["faults"] == ["x" * 400]


def test_writing_imports_only_the_standard_library() -> None:
    """The job's side of the spool brings neither numpy nor anything else that is installed into the job."""
    script = (
        "import sys, memprof.trace.files.spool\n"
        "allowed = sys.stdlib_module_names | {'memprof', '__main__'}\n"
        "print({m.partition('.')[0] for m in sys.modules if getattr(sys.modules[m], '__file__', None)} - allowed)"
    )
    isolated = [sys.executable, "-I", "-S", "-c", "import sys; sys.path.insert(0, '.')\n" + script]
    done = subprocess.run(isolated, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "set()", done.stderr
