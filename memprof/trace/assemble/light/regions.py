"""Cuts a stretch of a light recording into regions: module calls, backward nodes, updates, and what lies between.

A region takes the place of an operator in an ordinary recording: it is the smallest part of a step that can be
located.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memprof.trace.files.spool import BACKWARD, FORWARD, LOADING, OPTIMIZER, OTHER, Spool
from memprof.trace.schema import NONE, Ints

_MARK, _NODE_BEGINS, _NODE_ENDS = range(3)

#: Names of regions outside modules and nodes.
BETWEEN_CALLS, BETWEEN_NODES, UPDATE, SCRIPT = (
    "(between module calls)",
    "(between backward nodes)",
    "(optimizer update)",
    "(script)",
)


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
    node_of = [_module_of(sequence, modules, number) for number in nodes["sequence"].tolist()]
    _carry(node_of, nodes["sequence"].tolist())
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


def _carry(module_of_node: list[int], sequence: list[int]) -> None:
    """Assigns nodes without a number, which accumulate gradients, the module of the preceding node."""
    for row in range(1, len(sequence)):
        if sequence[row] < 0:
            module_of_node[row] = module_of_node[row - 1]


def _module_of(sequence: list[int], modules: list[int], node: int) -> int:
    """Returns the module that was running when autograd created a node, found by the sequence counter."""
    place = bisect_right(sequence, node) - 1 if node >= 0 else NONE
    return modules[place] if place >= 0 else NONE
