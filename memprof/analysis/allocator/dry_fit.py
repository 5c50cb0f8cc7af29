"""Whether a job fits the device simulated by a dry run, which never refuses an allocation."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.analysis.allocator.assumed_torch import describe_torch
from memprof.analysis.allocator.beyond_tensors import beyond_tensors
from memprof.analysis.report.breakdown import by_category, hold_at
from memprof.errors import BadInputError
from memprof.machines.catalogue import machine_of_device
from memprof.replay.live import peak_op
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.schema import DeviceMemory, Memory
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_bytes_between, format_bytes_change, format_percent


@dataclass(frozen=True)
class DryFit:
    """What a job would need of a device, and what the device has.

    Attributes:
        machine: Name of the device.
        capacity_bytes: Bytes available to torch.
        least_outside_bytes: Fewest bytes the process would use outside the allocator (`machines.outside`).
        outside_bytes: Most bytes of these.
        reserved_bytes: Peak bytes torch's allocator would reserve.
        allocated_bytes: Peak bytes it would have allocated.
        workspace_bytes: How much less and more these may be for workspaces that a library chooses (`beyond_tensors`).
        chosen_for: What these are for; "" without any.
        largest: The largest category at the fullest step's peak.
        share: Its share of that peak.
        communicators: NCCL communicators among what is outside the allocator.
        is_assumed: Whether the rank was ended early, and its communicators are those of the rank with the most.
        room_bytes: What a budget of the device's tensor capacity has to leave free (`beyond_tensors`).
        torch: Which torch it assumes, a clause.
    """

    machine: str
    capacity_bytes: int
    least_outside_bytes: int
    outside_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    largest: str
    share: float
    workspace_bytes: tuple[int, int] = (0, 0)
    chosen_for: str = ""
    communicators: int = 0
    is_assumed: bool = False
    room_bytes: int = 0
    torch: str = ""

    @property
    def least_used_bytes(self) -> int:
        """Fewest used bytes the whole device would show."""
        return self.reserved_bytes + self.workspace_bytes[0] + self.least_outside_bytes

    @property
    def used_bytes(self) -> int:
        """Most used bytes the whole device would show."""
        return self.reserved_bytes + self.workspace_bytes[1] + self.outside_bytes

    @property
    def fits(self) -> bool:
        """Whether the device has enough memory, whatever cuDNN chooses and the process uses outside the allocator."""
        return self.used_bytes <= self.capacity_bytes

    @property
    def headline(self) -> str:
        """Whether it fits, in one clause: what is needed and what the device has."""
        used, capacity = format_bytes_between(self.least_used_bytes, self.used_bytes), format_bytes(self.capacity_bytes)
        need = f"needs {used} of {capacity}"
        if self.fits:
            return f"Fits on {self.machine}: {need}"
        if self.least_used_bytes <= self.capacity_bytes:
            return f"May not fit on {self.machine}: {need}"
        over = format_bytes(self.least_used_bytes - self.capacity_bytes)
        return f"Does not fit on {self.machine}: {need} (at least {over} short)"

    @property
    def parts(self) -> str:
        """What the need is made of, in one clause."""
        reserved, allocated = format_bytes(self.reserved_bytes), format_bytes(self.allocated_bytes)
        outside = format_bytes_between(self.least_outside_bytes, self.outside_bytes)
        several = "s" if self.communicators > 1 else ""
        communicators = f", {self.communicators:,} NCCL communicator{several}" if self.communicators else ""
        communicators += " as on the rank with the most: this one was ended early" if self.is_assumed else ""
        parts = (
            f"{reserved} reserved for {allocated} of tensors, {outside} outside torch's allocator "
            f"(context, libraries{communicators})"
        )
        if self.workspace_bytes[1]:
            less, more = (format_bytes_change(count) for count in self.workspace_bytes)
            parts += f", {less} to {more} for workspaces of {self.chosen_for}"
        return f"{parts}; {self.torch}" if self.torch else parts

    def describe(self) -> str:
        """Returns a description of one or two sentences."""
        largest = f" Largest category: {self.largest}, {format_percent(self.share)} of the peak."
        return f"{self.headline}; {self.parts}.{'' if self.fits else largest}"


def dry_fit(trace: Trace) -> DryFit | None:
    """Compares a dry run's memory with the capacity of its device; None without one, or with nothing on it.

    Args:
        trace: The recording.
    """
    machine = trace.manifest.machine
    if trace.manifest.backend.name != DRY_RUN or machine.device_kind == "cpu":
        return None
    found = machine_of_device(machine.device_name)
    memory, device = trace.table(Memory), trace.table(DeviceMemory)
    on_card = memory.reserved_bytes >= 0  # the host's tensors have rows of their own, without reserved bytes
    if found is None or not on_card.any() or not len(device):
        return None
    try:
        step = trace.fullest_step()
    except BadInputError:
        return None  # it ended before the first one
    split = by_category(hold_at(step, peak_op(step)))
    most = split.parts[0] if split.parts else None
    beyond = beyond_tensors(trace)
    return DryFit(
        machine=found.name,
        capacity_bytes=machine.capacity_bytes,
        least_outside_bytes=beyond.outside.least_bytes,
        outside_bytes=beyond.outside.most_bytes,
        reserved_bytes=int(memory.reserved_bytes[on_card].max()),
        allocated_bytes=int(memory.allocated_bytes[on_card].max()),
        largest=(most.key if most is not None else None) or "unknown",
        share=most.bytes / split.total_bytes if most is not None else 0.0,
        workspace_bytes=beyond.workspace_bytes,
        chosen_for=beyond.chosen_for,
        communicators=trace.manifest.communicators.count,
        is_assumed=trace.manifest.communicators.is_assumed,
        room_bytes=beyond.room_bytes,
        torch=describe_torch(trace),
    )
