"""A step reduced to the fewest equivalent nodes, values and events: the input of an exact model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from memprof.planners.graph.graph import Graph
from memprof.planners.graph.stages import beside_values
from memprof.trace.schema import NONE


@dataclass(frozen=True, eq=False)
class Event:
    """A point of the step at which values are read or made, or at which other memory peaks.

    Attributes:
        first_op: The operator before which recompute for this event runs.
        last_op: The operator that ends it; differs where a node has several operators, or where views follow.
        node: The node that runs for the first time; NONE for an operator that makes no value.
        reads: The values that are read.
        busy_bytes: Other live bytes during it, workspace included.
        before_bytes: Other live bytes before it, during its recompute.
    """

    first_op: int
    last_op: int
    node: int
    reads: tuple[int, ...]
    busy_bytes: int
    before_bytes: int


@dataclass(frozen=True, eq=False)
class Blocks:
    """The reduced step. Values of one node with the same readers are merged.

    Attributes:
        members: Operators of each node, in order.
        reads: Values each node reads from others.
        makes: Values each node makes.
        cost_us: Time to rerun each node.
        extra_bytes: What each node holds while it runs, beyond its inputs and outputs.
        size: Bytes of each value.
        maker: Node of each value.
        taken: The value whose memory each reuses in place; NONE where it allocates its own.
        originals: The graph's values that each represents.
        events: In order.
        is_exact: Whether only values and operators that no schedule can treat differently were merged.
    """

    members: tuple[tuple[int, ...], ...]
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    cost_us: tuple[float, ...]
    extra_bytes: tuple[int, ...]
    size: tuple[int, ...]
    maker: tuple[int, ...]
    taken: tuple[int, ...]
    originals: tuple[tuple[int, ...], ...]
    events: tuple[Event, ...]
    is_exact: bool

    def last_use(self) -> list[int]:
        """Returns for each value the last event that needs it, directly or for recompute; NONE for none."""
        last = [NONE] * len(self.size)
        for number, event in enumerate(self.events):
            for value in event.reads:
                last[value] = max(last[value], number)
        for node in reversed(range(len(self.members))):
            latest = max((last[value] for value in self.makes[node]), default=NONE)
            for value in self.reads[node]:
                last[value] = max(last[value], latest)
        return last


def blocks_of(graph: Graph, most_nodes: int | None = None) -> Blocks:
    """Joins operators into nodes and finds the events.

    Operators that change in place a value only they read are joined with its maker, without loss. More are joined only
    if there are too many nodes: neighbours of which the second reads what the first makes, cheapest first. They run
    again together; each value they make is still kept or dropped individually. A node's inputs then count as live until
    the whole node has run, so a schedule never holds more than the model assumes.

    Source: Jain et al. 2020 (Checkmate), section 4, for the model that this feeds; the joining is ours.

    Args:
        graph: The step.
        most_nodes: Join until there are at most this many; None for a lossless reduction.
    """
    joined = _Joining(graph)
    joined.join_in_place()
    is_exact = most_nodes is None or joined.count <= most_nodes
    if most_nodes is not None:
        joined.join_cheapest(most_nodes)
    return joined.blocks(is_exact=is_exact)


class _Joining:
    """Groups of operators being joined."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._reads, self._made = graph.reads_by_op(), graph.values_by_op()
        self._size, self._maker = graph.value_bytes.tolist(), graph.value_op.tolist()
        self._taken = graph.taken_from.tolist()
        self._heir = {old: new for new, old in enumerate(self._taken) if old != NONE}
        self._readers: list[list[int]] = [[] for _ in range(graph.values)]
        for op_id, values in enumerate(self._reads):
            for value in values:
                self._readers[value].append(op_id)
        self._active = [op_id for op_id in range(graph.ops) if self._reads[op_id] or self._made[op_id]]
        self._place = {op_id: place for place, op_id in enumerate(self._active)}
        # Operators that only return views make no value, so they need not run again.
        self._looks = {op_id for op_id in self._active if not self._made[op_id] and graph.can_repeat[op_id]}
        # Groups by their last operator; only views lie between the members of a group.
        self._groups = {op_id: [op_id] for op_id in self._active if self._made[op_id]}

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self._groups)

    def join_in_place(self) -> None:
        """Joins each operator that only changes values in place with their maker, if nothing else reads them."""
        for op_id in sorted(self._groups):
            sources = {self._taken[value] for value in self._made[op_id]}
            if NONE not in sources and set(self._reads[op_id]) == sources:
                self._join(op_id)

    def join_cheapest(self, most: int) -> None:
        """Joins groups with the preceding neighbour that makes their inputs, until there are few enough."""
        while self.count > most:
            lost: dict[int, float] = {}
            for op_id, members in self._groups.items():
                source = self._source(op_id, is_shared=True)
                if source != NONE:
                    lost[op_id] = min(self._cost(members), self._cost(self._groups[source]))
            if not lost:
                return
            self._join(min(lost, key=lost.__getitem__), is_shared=True)

    def _cost(self, members: list[int]) -> float:
        return float(self._graph.cost_us[members].sum())

    def _source(self, op_id: int, *, is_shared: bool = False) -> int:
        """Returns the adjacent group before one that makes its inputs; NONE for none.

        Args:
            op_id: The last operator of the group.
            is_shared: Whether others may read what that group makes.
        """
        members = self._groups[op_id]
        place = self._place[members[0]] - 1
        while place >= 0 and self._active[place] in self._looks:
            place -= 1
        source = self._active[place] if place >= 0 else NONE
        if source not in self._groups:
            return NONE
        inside = {*members, *self._active[self._place[self._groups[source][0]] : self._place[op_id]]}
        readers = [
            reader for member in self._groups[source] for value in self._made[member] for reader in self._readers[value]
        ]
        is_read = not inside.isdisjoint(readers)
        return source if is_read and (is_shared or inside.issuperset(readers)) else NONE

    def _join(self, op_id: int, *, is_shared: bool = False) -> None:
        source = self._source(op_id, is_shared=is_shared)
        if source != NONE:
            self._groups[op_id] = self._groups.pop(source) + self._groups[op_id]

    def blocks(self, *, is_exact: bool) -> Blocks:
        """Builds nodes, values and events from the groups."""
        groups = [self._groups[last] for last in sorted(self._groups)]
        node_of = {member: node for node, group in enumerate(groups) for member in group}
        alike: dict[tuple[int, ...], list[int]] = {}
        for value, op_id in enumerate(self._maker):
            node = node_of[op_id]
            span = range(groups[node][0], groups[node][-1] + 1)
            outside = [reader for reader in self._readers[value] if reader not in span]
            readers = [reader for reader in outside if reader not in self._looks]
            is_version = value in self._heir or self._taken[value] != NONE
            if outside:
                alike.setdefault((node, NONE, value) if is_version else (node, *readers), []).append(value)
        originals = sorted(alike.values())
        name = {value: number for number, group in enumerate(originals) for value in group}
        reads, makes, extra = [], [], []
        for group in groups:
            inside = {value for member in group for value in self._made[member]}
            outer = {value for member in group for value in self._reads[member]} - inside
            reads.append(tuple(sorted({name[value] for value in outer})))
            makes.append(tuple(sorted({name[value] for value in inside if value in name})))
            extra.append(self._extra(group, inside, name))
        return Blocks(
            members=tuple(tuple(group) for group in groups),
            reads=tuple(reads),
            makes=tuple(makes),
            cost_us=tuple(self._cost(group) for group in groups),
            extra_bytes=tuple(extra),
            size=tuple(sum(self._size[value] for value in group) for group in originals),
            maker=tuple(node_of[self._maker[group[0]]] for group in originals),
            taken=tuple(self._named_source(group[0], name) for group in originals),
            originals=tuple(tuple(group) for group in originals),
            events=self._events(groups, makes, extra, name),
            is_exact=is_exact and not self._has_low_gap(groups),
        )

    def _has_low_gap(self, groups: list[list[int]]) -> bool:
        """Returns whether less is live somewhere between two events than right before the second.

        Recompute would be better placed there, but the model places it right before the event.
        """
        _, after = beside_values(self._graph)
        busy = [*self._active, self._graph.ops]
        firsts = {group[0] for group in groups}
        return any(
            low < high - 1 and int(after[low:high].min()) < int(after[high - 1])
            for low, high in pairwise(busy)
            if high in firsts or (high < self._graph.ops and high not in self._looks)
        )

    def _named_source(self, value: int, name: dict[int, int]) -> int:
        source = self._taken[value]
        while source != NONE and source not in name:
            source = self._taken[source]
        return name.get(source, NONE)

    def _extra(self, group: list[int], inside: set[int], name: dict[int, int]) -> int:
        """Returns the most a group holds beyond its inputs and outputs; outputs count throughout."""
        alive = [int(self._graph.workspace_bytes[member]) for member in group]
        for value in inside:
            end = value
            while end in self._heir and end not in name:
                end = self._heir[end]
            if end in name:  # its memory belongs to a value that is counted anyway
                continue
            born = group.index(self._maker[value])
            last = max((group.index(reader) for reader in self._readers[value] if reader in group), default=born)
            for at in range(born, last if value in self._heir else last + 1):
                alive[at] += self._size[value]
        return max(alive)

    def _events(
        self, groups: list[list[int]], makes: list[tuple[int, ...]], extra: list[int], name: dict[int, int]
    ) -> tuple[Event, ...]:
        graph = self._graph
        floor, floor_after = beside_values(graph)
        busy = floor + graph.workspace_bytes
        last_of = {group[-1]: node for node, group in enumerate(groups)}
        first_of = {group[-1]: group[0] for group in groups}
        inner = {other for group in groups for other in range(group[0], group[-1])}
        events: list[Event] = []
        at = 0
        for op_id in [*self._active, graph.ops]:
            node, first = last_of.get(op_id, NONE), first_of.get(op_id, op_id)
            if op_id in inner:
                continue
            if first > at:
                # An event between two only where more is live than at the event before.
                most = at + int(np.argmax(busy[at:first]))
                if not events or busy[most] > events[-1].busy_bytes:
                    events.append(Event(most, most, NONE, (), int(busy[most]), int(floor_after[max(most - 1, 0)])))
                at = first
            if op_id == graph.ops:
                break
            if node == NONE:
                level, reads = int(busy[op_id]), {name[value] for value in self._reads[op_id]}
            else:
                made = {value for member in groups[node] for value in self._made[member]}
                level = int(floor[first : op_id + 1].max()) + extra[node]
                reads = {name[v] for member in groups[node] for v in self._reads[member] if v not in made}
            before = int(floor_after[first - 1]) if first else int(floor[0])
            if events and node == NONE and level <= (left := int(floor_after[events[-1].last_op])):
                # Like a view, it takes no memory: anything recomputed before it can be recomputed after it.
                last = events[-1]
                is_read = reads <= {*last.reads, *(makes[last.node] if last.node != NONE else ())}
                if is_read and floor_after[op_id] <= left:
                    events[-1] = replace(last, last_op=op_id)
                    at = op_id + 1
                    continue
            events.append(Event(first, op_id, node, tuple(sorted(reads)), level, before))
            at = op_id + 1
        return tuple(events)
