"""What a trace says about itself: who was recorded where, by what, and how much of it."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from memprof.trace.schema import SCHEMA_VERSION

#: Name of the backend of a trace that was predicted, not recorded.
PREDICTED = "predicted"

#: Numbers are below this: sums of them have to fit 63 bits.
_MOST = 2**62

_HINTS: dict[type, dict[str, Any]] = {}


class _Json:
    """To and from JSON for the dataclasses below: unknown keys are ignored, missing ones take their default."""

    def to_json(self) -> dict[str, Any]:
        """Returns the object as JSON containers, ready for ``json.dump``."""
        return {name: _plain(getattr(self, name)) for name in _names(type(self))}

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Self:
        """Builds the object from what ``to_json`` wrote, by this version or another.

        Raises:
            TypeError: A key holds something of another type.
        """
        # Working them out takes longer than reading a manifest.
        hints = _HINTS.get(cls) or _HINTS.setdefault(cls, typing.get_type_hints(cls))
        known = {name: _typed(record[name], hints[name], name) for name in _names(cls) if name in record}
        return cls(**known)


@dataclass(frozen=True)
class Speed(_Json):
    """How fast the machine is, measured when the job was over; 0 where it was not.

    Attributes:
        memory_bytes_per_us: Bytes that copies within the device's memory read and write.
        to_host_bytes_per_us: Bytes copied from the device to the host; on CPU from memory to memory.
        from_host_bytes_per_us: The same the other way.
        fp32_flops_per_us: Operations of matrix products in fp32.
        bf16_flops_per_us: Operations of matrix products in bf16.
        threads: Threads that measured it, on CPU.
        how: How it was measured, or why not, a clause.
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
        device_name: Such as ``AMD EPYC 7B13`` or ``NVIDIA H100``.
        device_kind: ``cpu`` or ``cuda``.
        cores: Processor cores the job could use.
        memory_bytes: Main memory of the machine.
        capacity_bytes: Memory of the device that is recorded.
        driver: Version of the device's driver; empty on CPU.
        cuda: Version of CUDA; empty on CPU.
        allocator_settings: ``PYTORCH_ALLOC_CONF`` as the job saw it.
        os: Such as ``Linux 6.8``.
        speed: How fast it is; unknown in recordings of older versions, and in those made inside a ``with`` statement.
        short_types: Types shorter than float32 that oneDNN computes in on its processor, as torch calls them; in
            recordings of older versions, those of a processor with AVX-512.
    """

    device_name: str = ""
    device_kind: str = "cpu"
    cores: int = 0
    memory_bytes: int = 0
    capacity_bytes: int = 0
    driver: str = ""
    cuda: str = ""
    allocator_settings: str = ""
    os: str = ""
    speed: Speed = field(default_factory=Speed)
    short_types: tuple[str, ...] = ("bfloat16",)


@dataclass(frozen=True)
class Backend(_Json):
    """The recorder's source of memory events.

    Attributes:
        name: Such as ``cpu-native``.
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
        is_complete: The window asked for was recorded whole.
        ends_at: Where the recording ends otherwise, such as ``step 3, backward of layers.31.mlp``.
        reason: Why it ends there.
        exit_status: The job's exit status, negative for a signal; None while unknown.
    """

    is_complete: bool = True
    ends_at: str = ""
    reason: str = ""
    exit_status: int | None = None


@dataclass(frozen=True)
class Window(_Json):
    """The steps asked for.

    Attributes:
        skip: Steps left alone (warm-up) before it.
        steps: Steps recorded.
        stop: The job was ended after it.
    """

    skip: int = 0
    steps: int = 0
    stop: bool = False


@dataclass(frozen=True)
class Manifest(_Json):
    """The manifest of one recorded process.

    Attributes:
        schema_version: Version of the tables beside it.
        memprof_version: Version that wrote them.
        torch_version: Version of torch in the job.
        python_version: Version of Python in the job.
        created_us: When the recording began, Unix time in microseconds.
        command: The job's command line.
        target: What was recorded, such as ``train.py``.
        machine: Where it ran.
        rank: The process's rank in the job, 0 for a job of one.
        world_size: Processes in the job.
        pid: The process's id.
        node: Name of the machine it ran on; "" in recordings of older versions.
        clock: Whose clock its times are of: processes of one running system share it; "" where unknown.
        plan: The plan in force, or None.
        backend: Source of the memory events, and its blind spots.
        capture: How much was recorded.
        window: The steps asked for.
        op_times: Where operator durations come from, such as ``timed step 5``.
        undivided: Why the batches of its DataLoaders cannot be split into micro-batches, a clause; "" where they can
            be, or that is not known.
        notes: Sentences for the reader of a report.
    """

    schema_version: int = SCHEMA_VERSION
    memprof_version: str = ""
    torch_version: str = ""
    python_version: str = ""
    created_us: float = 0.0
    command: tuple[str, ...] = ()
    target: str = ""
    machine: Machine = field(default_factory=Machine)
    rank: int = 0
    world_size: int = 1
    pid: int = 0
    node: str = ""
    clock: str = ""
    plan: dict[str, Any] | None = None
    undivided: str = ""
    backend: Backend = field(default_factory=Backend)
    capture: Capture = field(default_factory=Capture)
    window: Window = field(default_factory=Window)
    op_times: str = "none"
    notes: tuple[str, ...] = ()


def number_ranks(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Makes the ranks of processes that are read together unique.

    Ranks stay as they are when no two are equal. Otherwise the processes are numbered in the order given, and
    each one that changes says so in its notes.

    Args:
        manifests: One for each process.

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


def _typed(value: Any, kind: Any, name: str) -> Any:
    """Returns a JSON value as its field's type; JSON has lists for tuples and may drop the ``.0`` of a float."""
    if isinstance(kind, types.UnionType):
        return None if value is None else _typed(value, typing.get_args(kind)[0], name)
    container = typing.get_origin(kind) or kind
    if container is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if container is dict and isinstance(value, dict):
        return value
    if issubclass(container, _Json) and isinstance(value, dict):
        return container.from_json(value)
    if container is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) < _MOST:  # NaN is not, either
            raise TypeError(f"{name!r} holds a number that is none, or far too large")
        return float(value)
    if container is int and type(value) is int and abs(value) >= _MOST:
        raise TypeError(f"{name!r} holds a number of more than 62 bits")
    if container in (bool, int, str) and type(value) is container:
        return value
    raise TypeError(f"{name!r} holds no {container.__name__}")
