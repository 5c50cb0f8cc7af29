"""What becomes of growth after the recorded steps, by the counts of tensors until the job ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memprof.analysis.leaks.growth import LEAST_STEPS
from memprof.analysis.leaks.leak import Leak, leaks_of_kinds, variable_of
from memprof.analysis.report.sources import find_sources
from memprof.trace.schema import NONE, Holders, Stacks
from memprof.trace.store import Trace

#: Growth has ended if, over this many steps after the window, tensors became more by less than this share of it.
_LATER, _LEFT = 8, 0.25
#: Rows on kinds that one statement after the window has at most.
_MOST_STATED = 12


def still_growing(trace: Trace, found: list[Leak], last: int) -> list[Leak]:
    """Returns leaks without those that ended with the window, such as caches: all tensors later are hardly more.

    Both their number and their bytes have to tell that: of bytes alone, a batch may be larger at the first statement
    than at all others. What only a graph holds, no variable refers to: it is not in these sums.

    Args:
        trace: The recording.
        found: The leaks of the recorded steps.
        last: The last of these steps.
    """
    holders = trace.table(Holders)
    sums = holders.take((holders.step > last + 1) & (holders.dtype == "") & (holders.tensors > 0))
    held = [leak for leak in found if leak.held_by is not None and leak.held_by.chain and not leak.held_by.is_by_graph]
    steps = int(sums.step[-1] - sums.step[0]) if len(sums) else 0
    if steps < _LATER:
        return found
    # The most of all, since at the end of the job local variables are gone.
    rise, more = (int(column.max() - column[0]) for column in (sums.total_bytes, sums.tensors))
    if rise >= _LEFT * steps * sum(leak.bytes_per_step for leak in held):
        return found
    if more >= _LEFT * steps * sum(leak.bytes_per_step * leak.tensors / max(leak.kept_bytes, 1) for leak in held):
        # Perhaps other tensors became more: statements on kinds, where there was room for all, tell which.
        kinds = holders.take((holders.step > sums.step[0]) & (holders.dtype != "") & (holders.tensors > 0))
        if not (kinds.chain != "").any() or np.unique(kinds.step, return_counts=True)[1].max() >= _MOST_STATED:
            return found
        stated = {variable_of(chain) for chain in kinds.chain.tolist()} | set(kinds.shape.tolist())
        held = [one for one in held if one.held_by and not stated & {one.shape, variable_of(one.held_by.chain)}]
    return [leak for leak in found if leak not in held]


def grown_later(trace: Trace, last: int) -> list[Leak]:
    """Returns what became more after the recorded steps, those of most bytes first, by statements on the tensors."""
    holders = trace.table(Holders)
    is_later = (holders.storage_id == NONE) & (holders.tensors > 0) & (holders.step > last + 1)
    sums = holders.take(is_later & (holders.dtype == ""))
    holders = holders.take(is_later & (holders.dtype != ""))
    leaks = []
    for kind, leak in leaks_of_kinds(holders, find_sources(trace.table(Stacks)), 0).items():
        alike = holders.take((holders.shape == kind[0]) & (holders.dtype == kind[1]) & (holders.device == kind[2]))
        alike = alike.take(alike.has_graph == kind[3])
        # Only the kinds of most bytes are stated each time: steps without a row of this one tell nothing of it.
        counts = np.array([alike.tensors[alike.step == step].max() for step in np.unique(alike.step)])
        is_ring = leak.held_by is not None and leak.held_by.kind == "ring"
        rises = counts[-1] > counts[0] and (np.diff(counts) >= 0).all()
        if (rises or (len(counts) == 1 and _fills_rise(leak, int(alike.step[0]), sums))) and not is_ring:
            leaks.append(replace(leak, every_steps=0))
    return sorted(leaks, key=lambda leak: -leak.kept_bytes)


def _fills_rise(leak: Leak, step: int, sums: Holders) -> bool:
    """Whether tensors of a kind stated once alone, at a run's last statement, are what all tensors became more by.

    What is kept once an epoch is stated so rarely. Each of several has to be in the rise of all, in number and bytes.
    """
    if len(sums) < LEAST_STEPS or int(sums.step[-1]) != step:
        return False
    size = leak.kept_bytes / max(leak.tensors, 1)
    more, rise = (int(column[-1] - column.min()) for column in (sums.tensors, sums.total_bytes))
    return min(leak.tensors, more) >= LEAST_STEPS and rise >= LEAST_STEPS * size
