"""Parses memory budgets: a size, a share of the recorded peak, or a device's capacity, plus limits on host memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal
from typing import Protocol

from memprof.errors import UsageError
from memprof.machines.catalogue import Accelerator, machine_of_device
from memprof.units import format_bytes, parse_bytes

#: Parts of a budget beside that of the device: host memory of the whole job, of the copies that plans pin there, and
#: one memory for both device and host.
_NAMED = ("host", "pinned", "unified")
_PERCENT = re.compile(r"\s*(?P<number>[+-]?[0-9]*\.?[0-9]*)\s*%\s*", re.ASCII)


@dataclass(frozen=True)
class HostBudget:
    """Limits on host memory.

    Attributes:
        job_bytes: Most bytes that all processes of the job may take with a plan's copies; None where not given.
        pinned_bytes: Most bytes of these copies; None for any.
        is_unified: Whether host and device share one memory, and the device's budget is for both.
    """

    job_bytes: int | None = None
    pinned_bytes: int | None = None
    is_unified: bool = False


#: Returns what a job may take of a device beyond its tensors and the context, in bytes; called for a device's budget.
Room = Callable[[], int]


def no_room() -> int:
    """Returns 0: nothing but tensors and the context is on the device."""
    return 0


class ReadBudget(Protocol):
    """A validated budget that is still to be read for a recording."""

    def __call__(self, recorded_peak_bytes: int, room: Room = no_room) -> int:
        """Returns the budget in bytes; arguments as for `parse_budget`."""
        ...


def parse_budget(
    text: str | None, recorded_peak_bytes: int, machine: Accelerator | None = None, room: Room = no_room
) -> int:
    """Parses a budget.

    Args:
        text: A size (``8GiB``, ``24GB``, ``6000000000``), or a percentage of the recorded peak (``60%``); None for the
            machine's whole tensor capacity less the room.
        recorded_peak_bytes: The peak of the recorded step.
        machine: The target machine; a size must not exceed its capacity.
        room: Returns what the job may take of the machine beyond its tensors and the context, in bytes.

    Returns:
        The budget, in bytes.

    Raises:
        UsageError: The text is not a valid budget, is zero, or exceeds the machine; or neither text nor machine is
            given.
    """
    if text is None:
        if machine is None:
            raise UsageError("a budget is needed: write --budget 24GiB, --budget 60%, or --device rtx3090")
        room_bytes = room()
        if room_bytes >= machine.budget_bytes:
            raise UsageError(
                f"{machine.name} has {format_bytes(machine.budget_bytes)} for tensors, all of which this job may take "
                "for workspaces and communicators: choose a larger device, or give --budget"
            )
        return machine.budget_bytes - room_bytes
    budget = _bytes(text, recorded_peak_bytes)
    if machine is not None and budget > machine.memory_bytes:
        raise UsageError(
            f"budget {format_bytes(budget)} exceeds the memory of {machine.name}: "
            f"{format_bytes(machine.memory_bytes)}, of which {format_bytes(machine.budget_bytes)} for tensors"
        )
    return budget


def split_budget(text: str | None) -> tuple[str | None, HostBudget]:
    """Splits ``24GiB,host=32GiB,pinned=2GiB``, or ``unified=96GiB``, into the device's budget and the host's.

    Args:
        text: The budget as given; None without one.

    Returns:
        The device's part, None where there is none, and the host's.

    Raises:
        UsageError: A part has an unknown name, is repeated, or is not a size.
    """
    if text is None:
        return None, HostBudget()
    device: list[str] = []
    named: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        name = name.strip()
        if not equals:
            device.append(part)
        elif name not in _NAMED or name in named:
            raise UsageError(
                f"invalid part {part.strip()!r} of the budget: write 24GiB,host=32GiB,pinned=2GiB, or unified=96GiB"
            )
        else:
            named[name] = parse_bytes(size)
            device += [size] if name == "unified" else []
    if len(device) > 1 or {"host", "unified"} <= set(named):
        raise UsageError(
            f"invalid budget {text.strip()!r}: write one size for the device, as in 24GiB,host=32GiB, or one for both, "
            "as in unified=96GiB"
        )
    return device[0] if device else None, HostBudget(named.get("host"), named.get("pinned"), "unified" in named)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except UsageError:
        if machine_of_device(text) is not None:
            raise UsageError(f"{text.strip()!r} is a device, not a size: give --device {text.strip()!r}") from None
        raise


def _bytes(text: str, recorded_peak_bytes: int) -> int:
    if "%" not in text:
        if text.strip().startswith("-"):
            raise UsageError(f"invalid budget {text.strip()}: must be positive; write a size such as 24GiB, or 60%")
        budget = _size(text)
        if budget == 0:
            raise UsageError("invalid budget of 0 bytes: must be positive; write a size such as 24GiB, or 60%")
        return budget
    match = _PERCENT.fullmatch(text)
    if match is None or not re.search("[0-9]", match["number"]):
        raise UsageError(f"invalid share of the recorded peak {text!r}: write a number and a percent sign, such as 60%")
    share = Decimal(match["number"])
    if share <= 0:
        raise UsageError(f"invalid budget of {text.strip()} of the recorded peak: must be more than 0%")
    if recorded_peak_bytes <= 0:
        raise UsageError(f"{text!r} is a share of the recorded peak, but this recording has none: write a size")
    if share > 10_000:
        raise UsageError(f"{text!r} is more than a hundred times the recorded peak: write a size such as 24GiB")
    # Rounded down, so that a budget never grows by rounding.
    budget = int((share * recorded_peak_bytes / 100).to_integral_value(rounding=ROUND_FLOOR))
    if budget == 0:
        raise UsageError(f"a budget of {text.strip()} of {format_bytes(recorded_peak_bytes)} is less than one byte")
    return budget
