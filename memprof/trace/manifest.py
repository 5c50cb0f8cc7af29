"""The manifest of a trace: who was recorded, where, by which version, and how completely."""

from __future__ import annotations

import dataclasses
import math
import signal
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from memprof.trace.schema import SCHEMA_VERSION

#: Name of the backend of a trace that was predicted, not recorded.
PREDICTED = "predicted"
#: Names of the backends of what torch recorded, imported.
IMPORTED = ("cuda-snapshot", "kineto-memory", "memory-timeline")
#: What pinned memory of the host is called as a device of its own.
PINNED = "pinned host memory"
#: Why a recording is not complete whose job has not ended.
RUNNING = "the job is still running"
#: And why where neither the job nor memprof runs any more, and the end of the job was not recorded.
UNFINISHED = "the job ended without finishing its recording"

#: Numbers must be below this, so that their sums fit in 63 bits.
_MOST = 2**62

_HINTS: dict[type, dict[str, Any]] = {}


class _Json:
    """To and from JSON for the dataclasses below: unknown keys are ignored, missing ones get their default."""

    def to_json(self) -> dict[str, Any]:
        """Returns the object as JSON containers, ready for ``json.dump``."""
        return {name: _plain(getattr(self, name)) for name in _names(type(self))}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Builds the object from the output of ``to_json``, of this or another version.

        Raises:
            TypeError: A value has the wrong type.
        """
        # Resolving the type hints takes longer than reading a manifest.
        hints = _HINTS.get(cls) or _HINTS.setdefault(cls, typing.get_type_hints(cls))
        known = {name: _typed(record[name], hints[name], name) for name in _names(cls) if name in record}
        return cls(**known)


@dataclass(frozen=True)
class Speed(_Json):
    """Speed of the machine, measured after the job ended; 0 where not measured.

    Attributes:
        memory_bytes_per_us: Bytes that copies within the device's memory read and write.
        to_host_bytes_per_us: Bytes copied from the device to the host; on CPU, within memory.
        from_host_bytes_per_us: The same in the other direction.
        fp32_flops_per_us: FLOPs of matrix products in fp32.
        bf16_flops_per_us: FLOPs of matrix products in bf16.
        threads: Threads used to measure it, on CPU.
        how: How it was measured, or why it was not, as a clause.
    """

    memory_bytes_per_us: float = 0.0
    to_host_bytes_per_us: float = 0.0
    from_host_bytes_per_us: float = 0.0
    fp32_flops_per_us: float = 0.0
    bf16_flops_per_us: float = 0.0
    threads: int = 0
    how: str = ""


@dataclass(frozen=True)
class Machine(_Json):
    """Where the job ran.

    Attributes:
        device_name: For example ``AMD EPYC 7B13`` or ``NVIDIA H100``.
        device_kind: ``cpu`` or ``cuda``.
        cores: CPU cores available to the job.
        memory_bytes: Main memory of the machine.
        capacity_bytes: Memory of the recorded device.
        driver: Version of the device's driver; empty on CPU.
        cuda: Version of CUDA; empty on CPU.
        cudnn: Version of the cuDNN that stated the workspaces of convolutions in a dry run; empty elsewhere.
        allocator_settings: ``PYTORCH_ALLOC_CONF`` as the job saw it.
        os: For example ``Linux 6.8``.
        speed: Its speed; unknown in recordings of older versions, and in those made inside a ``with`` statement.
        short_types: Types shorter than float32 that oneDNN computes in on its CPU, by their torch names; in
            recordings of older versions, those of a CPU with AVX-512.
        has_amx: Whether oneDNN multiplies bfloat16 in AMX tiles on its CPU.
        threads: Threads that share an operator of the job on the CPU; 0 where unknown, as in older recordings.
    """

    device_name: str = ""
    device_kind: str = "cpu"
    cores: int = 0
    memory_bytes: int = 0
    capacity_bytes: int = 0
    driver: str = ""
    cuda: str = ""
    cudnn: str = ""
    allocator_settings: str = ""
    os: str = ""
    speed: Speed = field(default_factory=Speed)
    short_types: tuple[str, ...] = ("bfloat16",)
    has_amx: bool = False
    threads: int = 0


@dataclass(frozen=True)
class Backend(_Json):
    """The recorder's source of memory events.

    Attributes:
        name: For example ``cpu-native``.
        sees: What it records, in words.
        blind_spots: What it cannot see, in words.
    """

    name: str = ""
    sees: tuple[str, ...] = ()
    blind_spots: tuple[str, ...] = ()


@dataclass(frozen=True)
class Capture(_Json):
    """How much of the job was recorded.

    Attributes:
        is_complete: The requested window was recorded completely.
        ends_at: Where an incomplete recording ends, such as ``step 3, backward of layers.31.mlp``.
        reason: Why an incomplete recording ends there.
        exit_status: The job's exit status, negative for a signal; None while unknown.
    """

    is_complete: bool = True
    ends_at: str = ""
    reason: str = ""
    exit_status: int | None = None


@dataclass(frozen=True)
class Window(_Json):
    """The requested steps.

    Attributes:
        skip: Warm-up steps before the window.
        steps: Steps recorded.
        stop: The job was stopped after the window.
    """

    skip: int = 0
    steps: int = 0
    stop: bool = False


@dataclass(frozen=True)
class Communicators(_Json):
    """NCCL communicators of a rank, counted in its dry run.

    Attributes:
        count: How many it used.
        near_peers: Ranks of its own machine to which it sends, or from which it receives, summed over communicators.
        sending_far: Communicators with which it sends to other machines, or receives from them.
        is_assumed: Whether the rank was ended before it was complete, and the values are the largest of any rank.
    """

    count: int = 0
    near_peers: int = 0
    sending_far: int = 0
    is_assumed: bool = False


@dataclass(frozen=True)
class Between(_Json):
    """Ranks of a pipeline that were not run: they store more micro-batches than one dry-run rank, fewer than another.

    Attributes:
        ranks: Their numbers.
        other: The second dry-run rank.
        shares: Where each is between the two by its stored micro-batches, from 0 (as the first) to 1 (as the other).
    """

    ranks: tuple[int, ...] = ()
    other: int = -1
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class LaterPeak(_Json):
    """The highest peak after the recorded steps, where it is above theirs: by the peak counter alone.

    Attributes:
        step: The job's step in which it was, or the first one in which it may have been; -1 without such a peak.
        steps: In how many steps from this one on it may have been.
        phase: What ran, ``forward or backward`` for both; "" where that is not known.
        line: The job's last line before it that is known, such as ``train.py:26``; "" for none.
        device: ``cuda:0``, whose allocated bytes are counted, or ``cpu``, where it is the process's resident memory.
        window_bytes: The same counter after the recorded steps; 0 where the job has reset it since.
        peak_bytes: The peak.
    """

    step: int = -1
    steps: int = 1
    phase: str = ""
    line: str = ""
    device: str = ""
    window_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True)
class Manifest(_Json):
    """The manifest of one recorded process.

    Attributes:
        schema_version: Version of the tables.
        memprof_version: Version of memprof that wrote them.
        torch_version: Version of torch in the job.
        torch_pin: What the job's project asks for, such as ``torch==2.4 (requirements.txt)``; only of dry runs.
        python_version: Version of Python in the job.
        created_us: Start of the recording, Unix time in microseconds.
        command: The job's command line.
        target: What was recorded, such as ``train.py``.
        machine: Where it ran.
        rank: The process's rank in the job; 0 for a single-process job.
        world_size: Processes in the job.
        same_ranks: In dry runs, other ranks that run the same operators on the same sizes, and were not run.
        between: In dry runs of pipelines, ranks between this one and another, which were not run.
        dry_ranks: In dry runs, the ranks that ``record --ranks`` asked for; 0 where the command starts all processes.
        dry_nodes: The nodes that ``record --nodes`` distributed these over.
        communicators: In dry runs of a distributed job, the communicators of this rank.
        pid: The process's id.
        node: Name of the machine it ran on; "" in recordings of older versions.
        clock: Identifies the clock of its times, shared by all processes of one running system; "" where unknown.
        plan: The plan in effect, or None.
        optimizers: Its optimizers seen updating, each as its class and what its updates need or have (``usages.py``).
        usages: What it does in the recorded steps that no operator shows, by the names of ``usages.py``.
        backend: Source of the memory events, and its blind spots.
        capture: How completely the job was recorded.
        window: The requested steps.
        budget_bytes: Budget of its live bytes; None without one.
        later: The highest peak after the recorded steps, where it is above theirs.
        op_times: Source of the operator durations, such as ``timed step 5``.
        undivided: Why the batches of its DataLoaders cannot be split into micro-batches, a clause; "" where they can
            be, or where that is unknown.
        notes: Sentences for the reader of a report.
        categories: Rules of categories by the user's own patterns, each ``name=pattern``.
    """

    schema_version: int = SCHEMA_VERSION
    memprof_version: str = ""
    torch_version: str = ""
    torch_pin: str = ""
    python_version: str = ""
    created_us: float = 0.0
    command: tuple[str, ...] = ()
    target: str = ""
    machine: Machine = field(default_factory=Machine)
    rank: int = 0
    world_size: int = 1
    same_ranks: tuple[int, ...] = ()
    between: Between = field(default_factory=Between)
    dry_ranks: int = 0
    dry_nodes: int = 1
    communicators: Communicators = field(default_factory=Communicators)
    pid: int = 0
    node: str = ""
    clock: str = ""
    plan: dict[str, Any] | None = None
    undivided: str = ""
    optimizers: tuple[str, ...] = ()
    usages: tuple[str, ...] = ()
    backend: Backend = field(default_factory=Backend)
    capture: Capture = field(default_factory=Capture)
    window: Window = field(default_factory=Window)
    budget_bytes: int | None = None
    later: LaterPeak = field(default_factory=LaterPeak)
    op_times: str = "none"
    notes: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()


def number_ranks(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Makes the ranks of processes unique when they are read together.

    Ranks stay as they are if they are unique. Otherwise the processes are numbered in the order given, and the
    notes of each one that changes say so.

    Returns:
        The manifests in the order given.
    """
    if len({manifest.rank for manifest in manifests}) == len(manifests):
        return list(manifests)
    return [
        manifest
        if manifest.rank == number
        else dataclasses.replace(
            manifest,
            rank=number,
            notes=(
                *manifest.notes,
                f"Several processes were recorded as rank {manifest.rank}; process {manifest.pid} is {number} here.",
            ),
        )
        for number, manifest in enumerate(manifests)
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, _Json):
        return value.to_json()
    return list(value) if isinstance(value, tuple) else value


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _typed(value: Any, kind: Any, name: str) -> Any:
    """Returns a JSON value as its field's type; JSON has lists for tuples and may drop a float's ``.0``."""
    if isinstance(kind, types.UnionType):
        return None if value is None else _typed(value, typing.get_args(kind)[0], name)
    container = typing.get_origin(kind) or kind
    item_kind = next(iter(typing.get_args(kind)), str)
    if container is tuple and isinstance(value, list) and all(type(item) is item_kind for item in value):
        return tuple(value)
    if container is dict and isinstance(value, dict):
        if not _is_finite(value):
            raise TypeError(f"{name!r} holds a number that is not finite")
        return value
    if issubclass(container, _Json) and isinstance(value, dict):
        return container.from_json(value)
    if container is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) < _MOST:  # also rejects NaN
            raise TypeError(f"{name!r} must be a finite number of less than 63 bits")
        return float(value)
    if container is int and type(value) is int and abs(value) >= _MOST:
        raise TypeError(f"{name!r} holds a number of more than 62 bits")
    if container in (bool, int, str) and type(value) is container:
        return value
    raise TypeError(f"{name!r} holds no {container.__name__}")


def signal_name(number: int) -> str:
    """Returns the name of a signal: ``SIGKILL``, or ``signal 77`` for one of the recording machine alone."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
