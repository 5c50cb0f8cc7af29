"""The raw recording a job leaves behind: frames of integers, appended to one file per process.

One append-only file for all streams means that a recording cut anywhere (SIGKILL, a full disk) is consistent up to its
last whole frame. ``spool_writer`` writes it, in the job; ``trace.assemble`` interprets the numbers afterwards.

A frame is a header (magic, length of the stream's name, length of the payload, CRC-32 of both), the name and the
payload: int64 rows for the streams in ``COLUMNS``, JSON for every other.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: Version of the raw streams. A spool is readable by the version that wrote it and later ones.
SPOOL_VERSION = 1

FILE_NAME = "recording.spool"

#: Begins the note in a recording that the kernel killed the job.
RAN_OUT = "out of memory:"
#: Begins the note that something else killed the job.
KILLED = "the job was killed (SIGKILL)"

#: Element type of what a container holds that has got many more elements; and what begins those of numpy's arrays.
OBJECTS, ARRAY = "Python objects", "numpy."

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
    # One row per block known to be alive when an epoch of the recording begins; its bytes are negative where torch's
    # allocator does not own it.
    "alive": ("time_ns", "address", "size_bytes"),
    # A fact about the memory at an address at a given time.
    "facts": ("time_ns", "address", "size_bytes", "category", "name", "module", "tensor"),
    # Operators of the timed step, parents before children.
    "times": ("name", "start_ns", "duration_ns", "depth"),
    # What the job reads from tensors; `line` and `value` are indices into the texts `read_lines` and `read_values`,
    # `previous` is the name of the operator before it, `elements` are those that a size depends on. A record
    # `reads_end` has the step from which on not all was kept.
    "reads": ("step", "line", "name", "previous", "elements", "value"),
    # Resident memory of the process.
    "rss": ("time_ns", "op", "rss_bytes"),
    # The process's heaps: bytes of the C library's in use and free, the small objects of Python, and the bytes of
    # tensors in main memory and of arrays where they were counted then, -1 elsewhere.
    "heap": ("time_ns", "used_bytes", "free_bytes", "blocks", "held_bytes"),
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
        "end_bytes",
        "input_elements",
    ),
    # Light recordings: counts that are the highest so far in their phase and module.
    "module_peaks": ("phase", "module", "step", "allocated_bytes"),
    # One row per allocation (size > 0) or free (size < 0) on a device other than the CPU; `device` is an index into
    # the `devices` texts, `total` and `reserved` are its allocator's own counts afterwards, or -1.
    "device_events": ("time_ns", "device", "address", "size_bytes", "total", "reserved"),
    # One row per report of a device's allocator to the profiler: the bytes of the block, negative for frees. They are
    # in the order of those entries of its history that allocate or free.
    "device_sizes": ("time_ns", "device", "size_bytes"),
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

#: Start of the note on how far a dry run of the whole loop came.
WHOLE = "whole loop"

#: Start of the note on the step whose inputs were larger than those of all recorded steps.
MISSED_STEP = "not recorded: "

#: Mark of a job that has an optimizer and called models only without gradients: its recording never began.
UNTRAINED = "untrained"

#: Start of the notes of a dry run on what was compiled.
COMPILED = "torch.compile"
#: Part of those notes where a region was not compiled.
RAN_EAGERLY = "ran eagerly"
#: Start of the note that evaluation keeps memory for a backward.
GRADIENTS_ENABLED = "evaluation runs with gradients enabled"
#: Start of the note that nothing of a job was placed on the virtual GPU that it was dry-run on.
UNUSED_DEVICE = "the job allocated nothing on the virtual device"

#: Rows of the table ``read_values`` of a recording, for the processes of a dry run, as JSON.
READ_VALUES = "read-values.json"

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
FLAG_IN_REGION = 512  # called by compiled code; its module and stack are those of the lines it was compiled from
FLAG_GENERATED = 1024  # run by compiled code without torch's dispatcher, so torch's profiler does not show it
FLAG_HOOKED = 2048  # what autograd saves of it goes to hooks of the job, or the job has disabled all hooks
#: From this bit on: 1 plus the index, in the texts `phases`, of the job's own name for the phase; 0 without.
NAME_SHIFT = 16
# Flags of the `calls` stream.
FLAG_CALL_RECOMPUTE = 1
FLAG_CALL_HOOKS = 2  # within it, operators ran with FLAG_HOOKED by hooks that were not there when it began
# Phase codes are indices into schema.PHASES; in light recordings, the job's own names (texts `phases`) follow.
FORWARD, BACKWARD, OPTIMIZER, OTHER, EVALUATION, SAVING, LOADING = range(7)
# Role codes are indices into schema.ROLES.
READ, WRITE, MUTATE = range(3)
# Category codes of the `facts` stream. HELD: a tensor that Python held when the recording began, purpose unknown.
PARAMETER, BUFFER, GRADIENT, OPTIMIZER_STATE, INPUT, ACTIVATION, HELD = range(7)

#: How a frame begins: magic, length of the name, length of the payload, CRC-32 of both, reserved.
FRAME_MAGIC = b"MPF1"
FRAME_HEADER = struct.Struct("<4sHIIH")


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
            while len(header := file.read(FRAME_HEADER.size)) == FRAME_HEADER.size:
                magic, name_length, length, _, _ = FRAME_HEADER.unpack(header)
                name = file.read(name_length)
                if magic != FRAME_MAGIC or name == b"operators":
                    return start, magic == FRAME_MAGIC
                if name == b"start" and start is None:
                    start = json.loads(file.read(length))
                else:
                    file.seek(length, os.SEEK_CUR)
    except (OSError, ValueError):
        return start, False
    return start, False


def _frames(data: bytes) -> Iterator[tuple[str, bytes, int]]:
    position = 0
    while position + FRAME_HEADER.size <= len(data):
        magic, name_length, length, checksum, _ = FRAME_HEADER.unpack_from(data, position)
        start = position + FRAME_HEADER.size + name_length
        payload = data[start : start + length]
        whole = data[start - name_length : start + length]
        if magic != FRAME_MAGIC or len(payload) < length or zlib.crc32(whole) != checksum:
            return
        position = start + length
        yield data[start - name_length : start].decode(), payload, position
