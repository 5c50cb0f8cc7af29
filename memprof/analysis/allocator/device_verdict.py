"""Whether a recorded job fits its device or a budget, in one sentence that every command and the dashboard print."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.analysis.allocator.dry_fit import dry_fit
from memprof.analysis.diff.budget import judge_budget
from memprof.analysis.out_of_memory.out_of_memory_words import describe_failure, describe_free
from memprof.analysis.out_of_memory.post_mortem import examine
from memprof.analysis.report.memory_use import summarise_devices
from memprof.machines.catalogue import machine_of_device
from memprof.trace.schema import DeviceMemory
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_bytes_of, spell_bytes_below

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
