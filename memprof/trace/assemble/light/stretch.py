"""Turns a stretch of a light recording into an ordinary raw recording, cut into module calls and backward.

A region takes the place of an operator in an ordinary recording: it is the smallest part of a step that can be
located.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from memprof.trace.assemble import texts
from memprof.trace.files.spool import (
    BACKWARD,
    COLUMNS,
    FLAG_RECOMPUTE,
    FORWARD,
    LOADING,
    OPTIMIZER,
    OTHER,
    RING_PREFIX,
    Spool,
    read_spool,
)
from memprof.trace.schema import NONE, Ints

#: Record streams of the whole run, passed on with the stretch unchanged.
_KEPT = (
    "modules",
    "module_bytes",
    "names",
    "phases",
    "tensors",
    "stacks",
    "notes",
    "plan",
    "out_of_memory",
    "holders",
    "optimizers",
    "fatal",
    "faults",
)
_MARK, _NODE_BEGINS, _NODE_ENDS = range(3)
#: Names of regions outside modules and nodes.
BETWEEN_CALLS, BETWEEN_NODES, UPDATE, SCRIPT = (
    "(between module calls)",
    "(between backward nodes)",
    "(optimizer update)",
    "(script)",
)


def choose_stretch(folder: Path) -> Spool | None:
    """Returns the last stretch that contains a whole step, else the last stretch; None where there is none.

    Raises:
        OSError: A file of the ring cannot be read.
    """
    numbered = sorted(
        (int(path.name.removeprefix(RING_PREFIX)), path)
        for path in folder.glob(f"{RING_PREFIX}*")
        if path.name.removeprefix(RING_PREFIX).isdecimal()
    )
    found = [spool for _, path in reversed(numbered) if len((spool := read_spool(path)).rows["marks"])]
    found = [spool for spool in found if len(spool.rows["events"])]
    return next((spool for spool in found if spool.records.get("steps")), found[0] if found else None)


def ordinary_spool(main: Spool, stretch: Spool) -> Spool:
    """Returns a stretch as an ordinary raw recording."""
    begin = stretch.records["begin"][0]
    ended = stretch.records.get("steps", [])
    last_event_ns = int(stretch.columns("events")["time_ns"].max())
    regions = cut_regions(stretch, last_event_ns)
    starts = np.array([region.start_ns for region in regions], dtype=np.int64)
    steps = _steps(begin, ended, starts)
    # What follows the last step belongs to no step if it is only the script on its way to the next one.
    regions = regions[: steps[-1]["end_op"]] if steps else regions
    names = texts.listed(main, "names")
    fresh: dict[str, int] = {}
    types = [record[2] for record in texts.listed(main, "modules")]
    start = main.records["start"][0]
    records: dict[str, list[Any]] = {stream: list(main.records[stream]) for stream in _KEPT if stream in main.records}
    records["start"] = [{**start, "window": {"skip": 0, "steps": max(len(ended), 1), "stop": False}}]
    records["epochs"] = [{"op": 0, "time_ns": begin["time_ns"], "source": "native"}]
    rows: list[int] = []
    ends = {step["step"]: step["end_ns"] for step in steps}
    for region, of_step in zip(regions, _step_of(steps, len(regions)), strict=True):
        name = region.name(names, types)
        number = fresh.setdefault(name, len(names) + len(fresh))
        # The recorder's own work between two steps is excluded from the job's time.
        last_ns = max(ends.get(of_step, region.end_ns), region.start_ns)
        rows += _operator(region, number, min(region.end_ns, last_ns))
    records["names"] = [*records.get("names", []), list(fresh)]
    streams = {name: np.empty((0, len(columns)), dtype=np.int64) for name, columns in COLUMNS.items()}
    streams["operators"] = np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS["operators"]))
    for stream in ("alive", "facts", "events"):
        rows_of = stretch.rows[stream]
        streams[stream] = rows_of[rows_of[:, 0] <= regions[-1].end_ns]
    streams["calls"] = _calls(stretch, starts)
    records["steps"] = steps
    if len(ended) == len(steps):
        records["end"] = [{"reason": "the stretch is over", "time_ns": last_event_ns}]
    return Spool(streams, records)


def _steps(begin: dict[str, Any], ended: list[dict[str, Any]], starts: Ints) -> list[dict[str, Any]]:
    """Returns the step records, including a last step that is incomplete."""
    records = []
    first = 0
    for position, step in enumerate(ended):
        # The recorder's work between two steps is counted in the earlier step.
        following = ended[position + 1]["start_ns"] if position + 1 < len(ended) else step["end_ns"]
        end = int(np.searchsorted(starts, following, side="left"))
        records.append(_step(step["step"], step["start_ns"], step["end_ns"], first, end, is_complete=True))
        first = end
    if first < len(starts) - 1:  # more than the script's code between steps
        last = ended[-1]["step"] + 1 if ended else begin["step"]
        records.append(_step(last, int(starts[first]), int(starts[-1]), first, len(starts), is_complete=False))
    return records


def _step(number: int, start_ns: int, end_ns: int, first: int, end: int, *, is_complete: bool) -> dict[str, Any]:
    return {
        "step": number,
        "kind": "recorded",
        "start_ns": start_ns,
        "end_ns": end_ns,
        "paused_ns": 0,
        "first_op": first,
        "end_op": end,
        "updates": 1,
        "members": 1,
        "micro_batches": 0,
        "is_complete": is_complete,
    }


def _step_of(steps: list[dict[str, Any]], regions: int) -> list[int]:
    found = [NONE] * regions
    for step in steps:
        found[step["first_op"] : step["end_op"]] = [step["step"]] * (step["end_op"] - step["first_op"])
    return found


def _operator(region: Region, name: int, end_ns: int) -> list[int]:
    values = dict.fromkeys(COLUMNS["operators"], 0)
    values |= {
        "start_ns": region.start_ns,
        "end_ns": end_ns,
        "name": name,
        "node_sequence": NONE,
        "module": region.module,
        "phase": region.phase,
        "flags": FLAG_RECOMPUTE if region.is_recompute else 0,
        "call": region.call,
        "stack": NONE,
    }
    return list(values.values())


def _calls(stretch: Spool, starts: Ints) -> Ints:
    """Returns the module calls with the first and last regions of each; the job does not number them."""
    rows = stretch.rows["calls"].copy()
    place = {name: i for i, name in enumerate(COLUMNS["calls"])}
    rows[:, place["first_op"]] = np.searchsorted(starts, rows[:, place["enter_ns"]], side="left")
    rows[:, place["end_op"]] = np.searchsorted(starts, rows[:, place["exit_ns"]], side="left")
    return rows


@dataclass(frozen=True)
class Region:
    """One region.

    Attributes:
        start_ns: Start time.
        end_ns: End time.
        phase: Phase code.
        module: Number of the innermost module; NONE outside.
        call: Number of the enclosing module call; NONE outside.
        node: Number of the backward node's name; NONE outside.
        is_recompute: A module is run again inside backward.
    """

    start_ns: int
    end_ns: int
    phase: int
    module: int
    call: int
    node: int
    is_recompute: bool

    def name(self, node_names: list[str], module_types: list[str]) -> str:
        """Returns the region's name."""
        if self.node != NONE:
            return node_names[self.node]
        if self.phase == BACKWARD and not self.is_recompute:
            return BETWEEN_NODES
        if self.module != NONE:
            return f"{module_types[self.module]}.forward"
        return {FORWARD: BETWEEN_CALLS, BACKWARD: BETWEEN_NODES, OPTIMIZER: UPDATE}.get(self.phase, SCRIPT)


def cut_regions(spool: Spool, end_ns: int) -> list[Region]:
    """Cuts a stretch into contiguous regions, in order.

    Args:
        spool: A file of the ring.
        end_ns: When the stretch ended.
    """
    marks, nodes = spool.columns("marks"), spool.columns("nodes")
    modules, phases = marks["module"].tolist(), marks["phase"].tolist()
    calls, sequence = marks["call"].tolist(), marks["sequence"].tolist()
    # The module that was running when autograd created a node, found by the sequence counter.
    places = (bisect_right(sequence, number) - 1 if number >= 0 else NONE for number in nodes["sequence"].tolist())
    node_of = [modules[place] if place >= 0 else NONE for place in places]
    for row in (np.flatnonzero(nodes["sequence"][1:] < 0) + 1).tolist():
        node_of[row] = node_of[row - 1]  # nodes without a number accumulate gradients of the preceding node
    node_name = nodes["name"].tolist()
    regions: list[Region] = []
    mark, since, last = NONE, 0, NONE
    is_after_node = False  # a node has ended since the mark: backward is running, or over
    running: list[tuple[int, int]] = []  # nodes, each with the mark that was current when it began
    for moment, kind, row in _edges(marks["time_ns"], nodes["start_ns"], nodes["end_ns"], end_ns):
        if mark != NONE and moment > since:
            module, phase, call, name = modules[mark], phases[mark], calls[mark], NONE
            is_recompute = False
            if running and (running[-1][1] == mark or module == NONE):
                module, phase, call, name = node_of[running[-1][0]], BACKWARD, NONE, node_name[running[-1][0]]
            elif running:
                phase, is_recompute = BACKWARD, True
            elif is_after_node:
                phase = phase if phase > LOADING else OTHER  # a phase named by the job continues
                if kind == _NODE_BEGINS:  # autograd's own work on the node's result
                    module, phase = last, BACKWARD
            regions.append(Region(since, moment, phase, module, call, name, is_recompute))
        since = moment
        if kind == _MARK:
            mark, is_after_node = row, False
        elif kind == _NODE_BEGINS:
            running.append((row, mark))
        else:
            running = [one for one in running if one[0] != row]
            last = node_of[row]
            is_after_node = not running
    return regions


def _edges(mark_ns: Ints, begin_ns: Ints, end_ns: Ints, last_ns: int) -> Iterator[tuple[int, int, int]]:
    """Yields the time of each change, what changes, and its row; the end of the stretch counts as a mark."""
    moments = np.concatenate((end_ns, mark_ns, begin_ns))
    kinds = np.repeat([_NODE_ENDS, _MARK, _NODE_BEGINS], [len(end_ns), len(mark_ns), len(begin_ns)])
    rows = np.concatenate((np.arange(len(end_ns)), np.arange(len(mark_ns)), np.arange(len(begin_ns))))
    order = np.argsort(moments, kind="stable")  # at equal times, ends come first
    yield from zip(moments[order].tolist(), kinds[order].tolist(), rows[order].tolist(), strict=True)
    yield max(last_ns, int(moments.max(initial=0))), _MARK, NONE
