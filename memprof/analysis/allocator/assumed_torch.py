"""Which torch a dry run assumes, and what is known of how much others take."""

from __future__ import annotations

import numpy as np

from memprof.machines.architectures import architecture_of
from memprof.machines.catalogue import machine_of_device
from memprof.machines.torch_differences import change_between, versions_of
from memprof.trace.files.spool import DRY_RUN
from memprof.trace.schema import Memory, Storages
from memprof.trace.store import Trace
from memprof.units import format_bytes_between


def describe_torch(trace: Trace) -> str:
    """Returns a clause on the torch of a dry run: ``assumes torch 2.13.0; the project asks for torch==2.4 (...)``.

    Where the project asks for another, or for none in particular, the bytes that these would take follow, as far as
    versions are known to differ (`machines.torch_differences`).

    Args:
        trace: The recording; "" is returned for one that is no dry run.
    """
    manifest = trace.manifest
    if manifest.backend.name != DRY_RUN:
        return ""
    pin, version = manifest.torch_pin, manifest.torch_version.partition("+")[0]
    words, (major, minor) = f"assumes torch {version}", version.split(".")[:2]
    assumed, versions = (int(major), int(minor)), versions_of(pin)
    if versions == (assumed,):
        return words
    words += f"; the project asks for {pin}" if pin else ""
    machine = machine_of_device(manifest.machine.device_name)
    architecture = None if machine is None else architecture_of(machine.capability)
    memory = trace.table(Memory)
    on_card = memory.reserved_bytes >= 0
    if architecture is None or not on_card.any() or not versions:
        return words
    peaks = [int(column[on_card].max()) for column in (memory.allocated_bytes, memory.reserved_bytes)]
    handles = int(np.count_nonzero(trace.table(Storages).name == "cuBLAS workspace"))
    ends = [change_between(architecture, assumed, each, handles, *peaks) for each in versions]
    changes = [(min(each[i] for each in ends), max(each[i + 1] for each in ends)) for i in (0, 2)]
    if not any(map(any, changes)):
        return words
    ranges = (
        f"{what} {format_bytes_between(peak + less, peak + more)}"
        for what, peak, (less, more) in zip(("allocated", "reserved"), peaks, changes, strict=True)
    )
    named = "" if pin else f" torch {_spell(versions[0])} to {_spell(versions[-1])}"
    return f"{words}{';' if named else ''}{named}: {', '.join(ranges)}"


def _spell(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
