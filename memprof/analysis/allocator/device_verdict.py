"""Whether a recorded job fits its device or a budget, also where a dry run simulated the device."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.analysis.allocator.uncertainty import beyond_tensors, describe_torch
from memprof.analysis.diff.budget import judge_budget
from memprof.analysis.host.host_forecast import HostForecast
from memprof.analysis.host.host_use import HostUse
from memprof.analysis.out_of_memory.out_of_memory_words import describe_failure, describe_free
from memprof.analysis.out_of_memory.post_mortem import examine
from memprof.analysis.report.breakdown import by_category, hold_at
from memprof.analysis.report.whole_run import summarise_devices
from memprof.errors import BadInputError
from memprof.machines.catalogue import machine_of_device
from memprof.replay.live import peak_op
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.schema import DeviceMemory, Memory
from memprof.trace.store import Trace
from memprof.units import (
    format_bytes,
    format_bytes_between,
    format_bytes_change,
    format_bytes_of,
    format_percent,
    spell_bytes_below,
)

#: States of a verdict: it fits, it may not, it does not (or ran out of memory), or there is nothing to compare with.
FITS, MAY_NOT_FIT, DOES_NOT_FIT, NO_LIMIT = "fits", "may-not-fit", "does-not-fit", "no-limit"


@dataclass(frozen=True)
class DeviceVerdict:
    """Whether a job fits.

    Attributes:
        state: One of the states above.
        sentence: The answer, without a full stop; "" without a limit.
        parts: What the need is made of, a clause; "" where that is not known.
        budget: A budget to search plans for, as an option value; "" where none follows from it.
        counts_reserved: Whether that budget is a device's, in which what the allocator reserves must fit.
    """

    state: str
    sentence: str = ""
    parts: str = ""
    budget: str = ""
    counts_reserved: bool = False


def judge_device(trace: Trace, budget_bytes: int | None = None) -> DeviceVerdict:
    """Judges a recording by a budget if one is given, otherwise by its device.

    A device's figure counts what a process takes of it, with the allocator's reserved bytes and the context; a budget
    is one of allocated bytes, as for `memprof suggest`.

    Args:
        trace: The recording; of several ranks, the one that is open for a device, all of them for a budget.
        budget_bytes: The budget, None for none.

    Raises:
        BadInputError: The recording is damaged.
    """
    if budget_bytes is not None:
        verdict = judge_budget(trace, budget_bytes)
        state = {True: FITS, False: DOES_NOT_FIT, None: MAY_NOT_FIT}[verdict.fits]
        return DeviceVerdict(
            state, _capitalised(verdict.headline.replace("OVER", "over", 1)), budget=spell_bytes_below(budget_bytes)
        )
    failure = examine(trace)
    if failure is not None and not failure.is_caught:
        sentence = _capitalised(describe_failure(failure).removesuffix("."))
        room = "" if failure.room_bytes is None else spell_bytes_below(failure.room_bytes)
        return DeviceVerdict(DOES_NOT_FIT, sentence, describe_free(failure), budget=room)
    fit = dry_fit(trace)
    if fit is not None:
        machine = machine_of_device(trace.manifest.machine.device_name)
        state = FITS if fit.fits else MAY_NOT_FIT if fit.least_used_bytes <= fit.capacity_bytes else DOES_NOT_FIT
        left = 0 if machine is None else machine.budget_bytes - fit.room_bytes
        budget = spell_bytes_below(left) if left > 0 else ""
        return DeviceVerdict(state, fit.headline, fit.parts, budget, counts_reserved=True)
    uses = [use for use in summarise_devices(trace.table(DeviceMemory)) if use.total_bytes > 0]
    if not uses or trace.manifest.machine.device_kind == "cpu":
        return DeviceVerdict(NO_LIMIT)
    fullest = max(uses, key=lambda use: use.used_bytes / use.total_bytes)
    name = trace.manifest.machine.device_name or fullest.device
    used = format_bytes_of(fullest.used_bytes, fullest.total_bytes)
    beside = fullest.used_bytes - fullest.reserved_bytes
    return DeviceVerdict(
        FITS,
        f"Fits on {name}: used {used}, {format_bytes(fullest.free_bytes)} free",
        f"{format_bytes(fullest.reserved_bytes)} reserved by torch, {format_bytes(beside)} outside its allocator",
    )


def _capitalised(sentence: str) -> str:
    return f"{sentence[:1].upper()}{sentence[1:]}"


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
        host_bytes: Fewest and most bytes of host memory, where the device has the same; zeros elsewhere.
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
    host_bytes: tuple[int, int] = (0, 0)

    @property
    def least_used_bytes(self) -> int:
        """Fewest used bytes the whole device would show."""
        return self.reserved_bytes + self.workspace_bytes[0] + self.least_outside_bytes + self.host_bytes[0]

    @property
    def used_bytes(self) -> int:
        """Most used bytes the whole device would show."""
        return self.reserved_bytes + self.workspace_bytes[1] + self.outside_bytes + self.host_bytes[1]

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
        if self.host_bytes[1]:
            parts += f", {format_bytes_between(*self.host_bytes)} on the host, which has the same memory"
        return f"{parts}; {self.torch}" if self.torch else parts

    def describe(self) -> str:
        """Returns a description of one or two sentences."""
        largest = f" Largest category: {self.largest}, {format_percent(self.share)} of the peak."
        return f"{self.headline}; {self.parts}.{'' if self.fits else largest}"


def dry_fit(trace: Trace) -> DryFit | None:
    """Compares a dry run's memory with the capacity of its device; None without one, or with nothing on it."""
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
    forecast = HostForecast.of(trace, HostUse.of(trace)) if found.is_unified else None
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
        host_bytes=(0, 0) if forecast is None else forecast.bounds,
    )
