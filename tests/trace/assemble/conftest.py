"""Raw recordings written by hand: operators, memory events and facts at chosen times."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from memprof.trace.assemble import assemble_devices
from memprof.trace.files.spool import COLUMNS, FORWARD, MUTATE, READ, WRITE, Spool, read_spool
from memprof.trace.files.spool_writer import SpoolWriter
from memprof.trace.manifest import Manifest
from memprof.trace.schema import Table

Assembled = tuple[Manifest, dict[type[Table], Table]]


@dataclass(frozen=True)
class Moments:
    """Operators, and allocator events between them.

    Attributes:
        operators: Start and end of each, in order and apart.
        events: Time, address and bytes of each, negative for frees; as one allocator would report them.
        alive: Bytes of existing blocks by address.
    """

    operators: list[tuple[int, int]]
    events: list[tuple[int, int, int]]
    alive: dict[int, int]


@st.composite
def jobs(draw: st.DrawFn) -> Moments:
    """Draws operators one after the other, and an allocator that uses few addresses again and again."""
    moments = sorted(draw(st.lists(st.integers(0, 60), min_size=2, max_size=12, unique=True)))
    operators = list(zip(moments[::2], moments[1::2], strict=False))
    sizes = st.sampled_from([1, 8, 100, 2**40])
    alive = draw(st.dictionaries(st.integers(1, 4), sizes))
    held, events = dict(alive), []
    for moment in sorted(draw(st.lists(st.integers(0, 60), max_size=30))):
        address = draw(st.integers(1, 6))
        if address in held:
            events.append((moment, address, -held.pop(address)))
        else:
            held[address] = draw(sizes)
            events.append((moment, address, held[address]))
    return Moments(operators, events, alive)


@dataclass
class RawJob:
    """One process's raw recording under construction; all moments are nanoseconds.

    By default a recording of one complete step 0 that began at moment 0, on the native source, with one thread.
    """

    folder: Path
    rows: dict[str, list[list[int]]] = field(default_factory=lambda: {stream: [] for stream in COLUMNS})
    names: list[str] = field(default_factory=list)
    tensors: list[list[str]] = field(default_factory=list)
    modules: list[list[Any]] = field(default_factory=list)
    stacks: list[list[Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    source: str = "native"
    is_late: bool = False
    end: str | None = "the window is over"
    window: dict[str, Any] = field(default_factory=lambda: {"skip": 0, "steps": 1, "stop": False})

    def operator(
        self,
        start: int,
        end: int,
        name: str = "aten.mm.default",
        *,
        reads: Iterable[int] = (),
        writes: Iterable[int] = (),
        mutates: Iterable[int] = (),
        size: int = 8,
        **columns: int,
    ) -> int:
        """Adds an operator that touches the memory at some addresses; returns its raw number."""
        number = len(self.rows["operators"])
        given = {
            "start_ns": start,
            "end_ns": end,
            "name": self.text(name),
            "node_sequence": -1,
            "module": -1,
            "phase": FORWARD,
            "call": -1,
            "stack": -1,
            **columns,
        }
        self.rows["operators"].append([given.get(column, 0) for column in COLUMNS["operators"]])
        for role, addresses in ((READ, reads), (MUTATE, mutates), (WRITE, writes)):
            tensor = self.tensor("2x4") if role == WRITE else -1
            self.rows["touches"] += [[number, address, size, role, tensor] for address in addresses]
        return number

    def event(self, moment: int, address: int, size_bytes: int, total: int = -1) -> None:
        """Adds a taking (positive bytes) or giving back (negative)."""
        self.rows["events"].append([moment, address, size_bytes, total])

    def fact(self, moment: int, address: int, category: int, name: str = "", module: int = -1, size: int = 8) -> None:
        """Adds what was stated about the memory at an address."""
        text = self.text(name) if name else -1
        self.rows["facts"].append([moment, address, size, category, text, module, self.tensor("2x4")])

    def step(self, number: int, kind: str, start: int, end: int, first_op: int, end_op: int, **more: Any) -> None:
        """Adds a step that has ended."""
        record = {"step": number, "kind": kind, "start_ns": start, "end_ns": end, "first_op": first_op}
        rest = {"paused_ns": 0, "updates": 1, "members": 1, "micro_batches": 1, "is_complete": True}
        self.steps.append({**record, "end_op": end_op, **rest, **more})

    def text(self, text: str) -> int:
        """Returns the number of a name."""
        if text not in self.names:
            self.names.append(text)
        return self.names.index(text)

    def tensor(self, shape: str, dtype: str = "float32", device: str = "cpu") -> int:
        """Returns the number of a tensor's shape and type."""
        if [shape, dtype, device] not in self.tensors:
            self.tensors.append([shape, dtype, device])
        return self.tensors.index([shape, dtype, device])

    def write(self) -> Spool:
        """Writes the recording and reads it back."""
        writer = SpoolWriter(self.folder)
        writer.write_record("start", self._start())
        for stream in ("names", "tensors", "modules", "stacks"):
            writer.write_record(stream, getattr(self, stream))
        for epoch in self.epochs or [{"op": 0, "time_ns": 0, "source": self.source}]:
            writer.write_record("epochs", epoch)
        for stream, rows in self.rows.items():
            writer.write_rows(stream, array("q", [number for row in rows for number in row]))
        operators = self.rows["operators"]
        if not self.steps and self.end is not None:
            self.step(0, "recorded", 0, max((row[1] for row in operators), default=0), 0, len(operators))
        for stream, records in (("steps", self.steps), ("notes", self.notes), ("faults", self.faults)):
            for record in records:
                writer.write_record(stream, record)
        if self.end is not None:
            writer.write_record("end", {"reason": self.end, "time_ns": 10**9})
        writer.close()
        return read_spool(self.folder)

    def assemble(self, exit_record: dict[str, Any] | None = None) -> Assembled:
        """Writes the recording and assembles it."""
        self.write()
        assembled = next(iter(assemble_devices(self.folder, {}, exit_record)), None)
        assert assembled is not None
        return assembled

    def _start(self) -> dict[str, Any]:
        return {
            "memprof_version": "0.1.0",
            "torch_version": "2.13.0",
            "python_version": "3.11.7",
            "time_ns": 0,
            "pid": 11,
            "argv": ["train.py"],
            "rank": 0,
            "world_size": 1,
            "is_late": self.is_late,
            "window": self.window,
            "machine": {"device_name": "CPU", "device_kind": "cpu", "cores": 2, "memory_bytes": 2**34, "os": "Linux"},
        }


@pytest.fixture
def raw_job(tmp_path: Path) -> RawJob:
    """An empty raw recording."""
    return RawJob(tmp_path / "process-11")
