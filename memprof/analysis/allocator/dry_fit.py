"""Whether a job fits the device simulated by a dry run, which never refuses an allocation."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.analysis.report.breakdown import by_category, hold_at
from memprof.errors import BadInputError
from memprof.machines.catalogue import machine_of_device
from memprof.replay.live import peak_op
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.schema import DeviceMemory, Memory
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_percent


@dataclass(frozen=True)
class DryFit:
    """What a job would need of a device, and what the device has.

    Attributes:
        machine: Name of the device.
        capacity_bytes: Bytes available to torch.
        context_bytes: Bytes the process uses outside the allocator, by a rule of thumb.
        reserved_bytes: Peak bytes torch's allocator would reserve.
        allocated_bytes: Peak bytes it would have allocated.
        largest: The largest category at the fullest step's peak.
        share: Its share of that peak.
    """

    machine: str
    capacity_bytes: int
    context_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    largest: str
    share: float

    @property
    def used_bytes(self) -> int:
        """Used bytes the whole device would show."""
        return self.reserved_bytes + self.context_bytes

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory."""
        return self.used_bytes <= self.capacity_bytes

    def describe(self) -> str:
        """Returns a description of one or two sentences."""
        used, capacity = format_bytes(self.used_bytes), format_bytes(self.capacity_bytes)
        reserved, allocated = format_bytes(self.reserved_bytes), format_bytes(self.allocated_bytes)
        context = format_bytes(self.context_bytes)
        parts = f"{reserved} reserved for {allocated} of tensors, and {context} for the context (rule)"
        need = f"needs {used} of {capacity}"
        if self.fits:
            return f"Fits on {self.machine}: {need}; {parts}."
        over = format_bytes(self.used_bytes - self.capacity_bytes)
        return (
            f"Does not fit on {self.machine}: {need} ({over} short); {parts}. Largest category: {self.largest}, "
            f"{format_percent(self.share)} of the peak."
        )


def dry_fit(trace: Trace) -> DryFit | None:
    """Compares a dry run's memory with the capacity of its device; None for other recordings.

    Args:
        trace: The recording.
    """
    machine = trace.manifest.machine
    if trace.manifest.backend.name != DRY_RUN or machine.device_kind == "cpu":
        return None
    found = machine_of_device(machine.device_name)
    memory, device = trace.table(Memory), trace.table(DeviceMemory)
    if found is None or not len(memory) or not len(device):
        return None
    try:
        step = trace.fullest_step()
    except BadInputError:
        return None  # it ended before the first one
    split = by_category(hold_at(step, peak_op(step)))
    most = split.parts[0] if split.parts else None
    return DryFit(
        machine=found.name,
        capacity_bytes=machine.capacity_bytes,
        context_bytes=int((device.used_bytes - device.reserved_bytes).max()),
        reserved_bytes=int(memory.reserved_bytes.max()),
        allocated_bytes=int(memory.allocated_bytes.max()),
        largest=(most.key if most is not None else None) or "unknown",
        share=most.bytes / split.total_bytes if most is not None else 0.0,
    )
