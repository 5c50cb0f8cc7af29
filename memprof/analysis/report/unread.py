"""Copies of weights that no recorded step reads, and the variables that hold them: what `del` would free."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from memprof.analysis.report.moments import find_peak
from memprof.analysis.report.sources import Sources
from memprof.trace.schema import NONE, Bools, Holders, Ints, Modules, Storages, Uses
from memprof.trace.step import Step
from memprof.trace.store import Trace
from memprof.units import format_bytes, format_percent

#: Less than this share of the peak is not worth a sentence.
_WORTH = 0.05
#: In a chain: where the variable, with its attributes, ends and what is inside begins.
_INSIDE = re.compile(r"\[|\._modules\b|\._parameters\b|\._buffers\b")


@dataclass(frozen=True)
class Unread:
    """What one variable holds at the peak that no recorded step reads.

    Attributes:
        variable: The variable, such as ``state`` or ``self.spare``.
        place: File and line of its first assignment, "" where unknown.
        bytes: Bytes of its storages.
        share: The same as a share of the peak.
    """

    variable: str
    place: str
    bytes: int
    share: float

    def describe(self) -> str:
        """Returns the advice in one sentence."""
        place = f" ({self.place})" if self.place else ""
        return (
            f"`{self.variable}`{place} holds {format_bytes(self.bytes)}, {format_percent(self.share)} of the peak, "
            f"that no recorded step reads: if nothing reads it later, `del {self.variable}` frees it"
        )


def find_unread(trace: Trace, step: Step, sources: Sources) -> tuple[Unread, ...]:
    """Finds the variables that hold copies of weights which no recorded step reads, most bytes first.

    Copies of weights are models that no step calls, and other tensors in the shape of a parameter: a loaded
    checkpoint, the weights before training, the best so far. A data set may be read later.
    """
    holders, storages = trace.table(Holders), trace.table(Storages)
    holders = holders.take(
        (holders.tensors == 0) & (holders.storage_id != NONE) & ~holders.is_by_graph & (holders.kind != "cycle")
    )
    if not len(holders):
        return ()
    row = np.searchsorted(storages.storage_id, holders.storage_id)
    peak = find_peak(step, sources)
    peak_bytes, moment = peak.allocated_bytes, step.first_op_id + peak.op_id
    created, freed = storages.created_op_id[row], storages.freed_op_id[row]
    is_wanted = (created < step.first_op_id) & ((freed == NONE) | (freed > moment))
    is_wanted &= ~_is_used(trace.table(Uses), storages, step.first_op_id)[row]
    shapes = storages.shape[(storages.category == "parameter") & (storages.shape != "")]
    category = storages.category[row]
    is_loose = np.isin(category, ["unknown", "temporary", "input"]) & np.isin(holders.shape, shapes)
    is_idle = np.isin(category, ["parameter", "buffer"])
    is_wanted &= is_loose | (is_idle & np.isin(storages.module_id[row], _idle_modules(trace, storages)))
    found: dict[tuple[str, int], int] = {}
    for one in np.flatnonzero(is_wanted).tolist():
        key = (_INSIDE.split(str(holders.chain[one]))[0], int(holders.stack_id[one]))
        found[key] = found.get(key, 0) + int(storages.allocated_bytes[row[one]])
    lines = {stack: sources.of_stack(stack) for _, stack in found}
    return tuple(
        Unread(variable, "" if (line := lines[stack]) is None else line.place, size, size / peak_bytes)
        for (variable, stack), size in sorted(found.items(), key=lambda one: -one[1])
        if size >= _WORTH * peak_bytes
    )


def _is_used(uses: Uses, storages: Storages, first_op_id: int) -> Bools:
    """Returns which storages any operator reads, or changes from the step of the peak on."""
    is_use = (uses.role == "read") | (uses.op_id >= first_op_id)
    used: Bools = np.isin(storages.storage_id, uses.storage_id[is_use])
    return used


def _idle_modules(trace: Trace, storages: Storages) -> Ints:
    """Returns the modules of the models none of whose memory any operator uses."""
    modules = trace.table(Modules)
    root = np.arange(len(modules))
    for place, parent in enumerate(modules.parent_id.tolist()):  # parents come before their children
        root[place] = place if parent == NONE else root[parent]
    used = np.isin(storages.storage_id, trace.table(Uses).storage_id) & (storages.module_id != NONE)
    idle: Ints = modules.module_id[~np.isin(root, root[storages.module_id[used]])]
    return idle
