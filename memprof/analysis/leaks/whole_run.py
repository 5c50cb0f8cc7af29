"""The tensors that stay over a whole run, from the statements of a light recording."""

from __future__ import annotations

import numpy as np

from memprof.analysis.leaks.growth import Growth
from memprof.analysis.leaks.leak import HeldBy, Leak, held_by
from memprof.analysis.report.sources import Sources, find_sources
from memprof.trace.schema import NONE, Holders, Modules, Stacks
from memprof.trace.store import Trace

#: Lines last stated in the first half of a run are of a leak if they make up no more than this share of the growth.
_MOST_OF_GROWTH = 1.25

#: Shape, element type, device, and whether they have an autograd graph.
_Kind = tuple[str, str, str, bool]


def leaks_of_run(trace: Trace, growth: Growth) -> list[Leak]:
    """Finds the kinds of tensors of which Python held more at each statement over a run, by line where it is known.

    Args:
        trace: A light recording.
        growth: Its growth.
    """
    holders, sources = trace.table(Holders), find_sources(trace.table(Stacks))
    kinds = _of_kinds(holders.take(holders.made_step == NONE), sources, growth)
    followed = holders.take(holders.made_step != NONE)
    by_line: dict[str, list[int]] = {}
    for row in np.argsort(-followed.step, kind="stable").tolist():
        source = sources.of_stack(int(followed.made_stack_id[row]))
        by_line.setdefault("" if source is None else source.place, []).append(row)
    # The last statement on each line: at the end of the run, local variables may be gone.
    latest = {
        place: [row for row in rows if followed.step[row] == followed.step[rows[0]]] for place, rows in by_line.items()
    }
    is_late = {place: bool(followed.step[rows[0]] >= growth.last_step // 2) for place, rows in latest.items()}
    # Short runs are stated early alone. What was kept then may be a cache that has stopped growing since.
    if sum(_bytes_per_step(followed, rows) for rows in latest.values()) > _MOST_OF_GROWTH * (
        growth.bytes_per_step or 0
    ):
        latest = {place: rows for place, rows in latest.items() if is_late[place]}
    by_kind: dict[_Kind, list[int]] = {}
    for row in (row for rows in latest.values() for row in rows):
        by_kind.setdefault(_kind(followed, row), []).append(row)
    modules, leaks = trace.table(Modules), []
    for place, rows in latest.items():
        chains = [row for row in by_line[place] if followed.chain[row]]
        chains.sort(key=lambda row: followed.stack_id[row] == NONE)  # at the end of a run, a variable's line is unknown
        held = None
        if chains:
            held = held_by(followed, chains[0], sources, is_by_graph=bool(followed.is_by_graph[chains[0]]))
        leaks.append(_of_line(modules, followed, rows, kinds, by_kind, place, held))
    return [*leaks, *(leak for kind, leak in kinds.items() if kind not in by_kind)]


def _of_kinds(holders: Holders, sources: Sources, growth: Growth) -> dict[_Kind, Leak]:
    """Finds the kinds of tensors that become more from the first statement on them to the last."""
    kinds: dict[_Kind, dict[int, int]] = {}
    for row in range(len(holders)):
        kinds.setdefault(_kind(holders, row), {}).setdefault(int(holders.step[row]), row)
    leaks = {}
    for kind, rows in kinds.items():
        first, last = rows[min(rows)], rows[max(rows)]
        steps = int(holders.step[last] - holders.step[first])
        per_tensor = int(holders.total_bytes[last]) // max(int(holders.tensors[last]), 1)
        grown = int(holders.tensors[last] - holders.tensors[first]) if steps else int(holders.tensors[last])
        rate = grown / (steps or max(int(holders.step[last]), 1))
        if grown <= 0 or int(holders.step[last]) < growth.last_step // 2:
            continue
        every = [row for row in np.flatnonzero(holders.step == holders.step[last]).tolist() if holders.chain[row]]
        own = [row for row in every if (holders.shape[row], holders.dtype[row]) == kind[:2]]
        leaks[kind] = Leak(
            bytes_per_step=round(rate * per_tensor),
            kept_bytes=int(holders.total_bytes[last]),
            tensors=int(holders.tensors[last]),
            since_step=max(0, round(int(holders.step[last]) - int(holders.tensors[last]) / rate)),
            category="activation" if kind[3] else "unknown",
            shape=kind[0],
            dtype=kind[1],
            op="",
            module="",
            line="",
            every_steps=1,
            held_by=held_by(holders, own[0], sources, is_by_graph=False) if own else None,
        )
    return leaks


def _of_line(
    modules: Modules,
    followed: Holders,
    rows: list[int],
    kinds: dict[_Kind, Leak],
    by_kind: dict[_Kind, list[int]],
    place: str,
    held: HeldBy | None,
) -> Leak:
    """Returns the leak of a line whose tensors of every step that was followed have stayed.

    What has stayed of a line over the run is not counted: lines share the tensors of their kinds as they share those
    of the steps that were followed.

    Args:
        modules: The modules.
        followed: What is left of the steps that were followed.
        rows: Its rows of the line.
        kinds: The kinds of tensors that become more.
        by_kind: Rows of all lines of each kind.
        place: The line.
        held: What keeps its tensors alive.
    """
    kept_bytes = tensors = 0.0
    since = []
    for row in rows:
        kind = _kind(followed, row)
        whole, alike = kinds.get(kind), by_kind[kind]
        bytes_of, count_of = int(followed.total_bytes[row]), int(followed.tensors[row])
        if whole is None:
            kept_bytes, tensors = kept_bytes + bytes_of, tensors + count_of
            continue
        kept_bytes += whole.kept_bytes * bytes_of / int(followed.total_bytes[alike].sum())
        tensors += whole.tensors * count_of / int(followed.tensors[alike].sum())
        since += [] if whole.since_step is None else [whole.since_step]
    largest = max(rows, key=lambda row: int(followed.total_bytes[row]))
    module = int(followed.module_id[largest])
    return Leak(
        bytes_per_step=_bytes_per_step(followed, rows),
        kept_bytes=round(kept_bytes),
        tensors=round(tensors),
        since_step=min(since, default=None),
        category="activation" if followed.has_graph[largest] else "unknown",
        shape=str(followed.shape[largest]),
        dtype=str(followed.dtype[largest]),
        op=str(followed.op[largest]),
        module="" if module == NONE else str(modules.name[module]) or str(modules.type[module]),
        line=place,
        every_steps=1,
        held_by=held,
    )


def _bytes_per_step(followed: Holders, rows: list[int]) -> int:
    steps, sizes = followed.made_step[rows], followed.total_bytes[rows]
    return int(np.median([int(sizes[steps == step].sum()) for step in set(steps.tolist())]))


def _kind(holders: Holders, row: int) -> _Kind:
    return (
        str(holders.shape[row]),
        str(holders.dtype[row]),
        str(holders.device[row]),
        bool(holders.has_graph[row]),
    )
