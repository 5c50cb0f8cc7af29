"""One process's raw recording, with operators and allocation events in one order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from memprof.trace.assemble import texts
from memprof.trace.assemble.memory.native_events import DeviceEvents, devices_of, read_device_events, within
from memprof.trace.assemble.steps import Epoch, choose_epoch, last_event_ns, later_epochs, number_steps
from memprof.trace.assemble.timeline import Timeline, merge
from memprof.trace.files.spool import Spool
from memprof.trace.schema import NONE, Bools, Ints


@dataclass(frozen=True)
class Recording:
    """A raw recording in order. A *row* is an operator of the trace; a *raw* operator is one as recorded.

    Attributes:
        spool: The raw streams.
        epoch: The epoch being reported.
        memory_events: Recorded memory events of the device being reported.
        is_cut_off: The process ended without closing the recording.
        is_late: Memory was allocated before this part without a record from the allocator.
        raw: Columns of the raw operators in the epoch. Shape (raw,) each.
        timeline: Rows and events in one order.
        names: Interned names.
        tensors: Interned shapes and types.
        raw_step: Step of each raw operator.
        row_of_raw: Row of each raw operator.
        is_real: Rows that are operators, not memory allocated between operators. Shape (rows,).
        before: Raw operator at or before each row.
        after: Raw operator at or after each row.
    """

    spool: Spool
    epoch: Epoch
    memory_events: DeviceEvents
    is_cut_off: bool
    is_late: bool
    raw: dict[str, Ints]
    timeline: Timeline
    names: list[str]
    tensors: texts.TensorKinds
    raw_step: Ints
    row_of_raw: Ints
    is_real: Bools
    before: Ints
    after: Ints

    @property
    def raw_count(self) -> int:
        """Number of raw operators."""
        return len(self.raw["start_ns"])

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.is_real)

    def spread(self, values: Any, fill: Any) -> Any:
        """Spreads a column of raw operators over the rows; rows that are not operators get `fill`."""
        return np.where(self.is_real, values[self.before], fill)

    def rows_of(self, raw: Ints) -> Ints:
        """Returns the row of each raw operator, NONE for NONE."""
        return np.where(raw == NONE, NONE, self.row_of_raw[raw])

    def in_epoch(self, stream: str) -> dict[str, Ints]:
        """Returns the columns of a timed stream, restricted to the epoch."""
        return within(self.spool.columns(stream), self.epoch)


def open_recordings(spool: Spool) -> list[Recording]:
    """Opens a process's recording once for each device used, the most bytes first; empty without operators."""
    epoch = choose_epoch(spool)
    devices = [] if epoch is None else devices_of(spool, epoch)
    found = [_open(spool, epoch, device) for device in devices]
    return [recording for recording in found if recording is not None]


def open_later(spool: Spool, device: str) -> list[Recording]:
    """Opens what was recorded of a device after the window, epoch by epoch."""
    epochs = [epoch for epoch in later_epochs(spool) if device in devices_of(spool, epoch)]
    found = [_open(spool, epoch, device, is_late=True) for epoch in epochs]
    return [recording for recording in found if recording is not None]


def _open(spool: Spool, epoch: Epoch | None, device: str, *, is_late: bool = False) -> Recording | None:
    if epoch is None or not spool.records.get("start"):
        return None
    is_cut_off = not spool.records.get("end")
    columns = spool.columns("operators")
    end = epoch.end_op
    if is_cut_off:  # operators after the last memory event on disk have no memory data
        end = min(end, int(np.searchsorted(columns["end_ns"], last_event_ns(spool, epoch), side="right")))
    if end <= epoch.first_op:
        return None
    raw = {name: values[epoch.first_op : end] for name, values in columns.items()}
    memory_events = read_device_events(spool, epoch, device)
    timeline = merge(
        raw["start_ns"], raw["end_ns"], memory_events.time_ns, memory_events.address, memory_events.size_bytes
    )
    is_real = timeline.raw_op != NONE
    position = np.cumsum(is_real)
    last = len(raw["start_ns"]) - 1
    return Recording(
        spool=spool,
        epoch=epoch,
        memory_events=memory_events,
        is_cut_off=is_cut_off,
        is_late=is_late or bool(spool.records["start"][0]["is_late"]),
        raw=raw,
        timeline=timeline,
        names=texts.listed(spool, "names"),
        tensors=texts.tensor_kinds(spool),
        raw_step=number_steps(spool, epoch)[: last + 1],
        row_of_raw=timeline.row_of_raw(last + 1),
        is_real=is_real,
        before=np.clip(position - 1, 0, last),
        after=np.clip(np.where(is_real, position - 1, position), 0, last),
    )
