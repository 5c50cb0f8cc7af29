"""The shortest time over all schedules of a small graph, by brute force: the oracle of the exact planners."""

from __future__ import annotations

import heapq
import math

from memprof.planners.graph.graph import Graph


def least_extra_us(graph: Graph, budget_bytes: int, *, is_persistent: bool = False) -> float:
    """Finds the shortest path through every state that any schedule can be in.

    A state is the next operator of the step and the set of values that are alive. From each, a value can be dropped,
    an operator that may repeat and finds what it reads can run again at its cost, or the next operator of the step can
    run. A move is allowed only if the live bytes during it fit. Only for graphs without in-place operators, in which
    every value is freed after its last reader.

    Args:
        graph: The step.
        budget_bytes: Most bytes alive at once.
        is_persistent: Only schedules that hold what they keep until its backward: a value can be dropped earlier only
            if the next operator read it right after it was computed. Such values, and the last computed one, are then
            part of the state.

    Returns:
        Microseconds added to the step; infinite where no schedule fits.
    """
    reads = [sum(1 << value for value in values) for values in graph.reads_by_op()]
    makes = [sum(1 << value for value in values) for values in graph.values_by_op()]
    size = graph.value_bytes.tolist()
    bytes_of = [sum(size[v] for v in range(graph.values) if mask >> v & 1) for mask in range(1 << graph.values)]
    repeats = [op_id for op_id in range(graph.ops) if graph.can_repeat[op_id] and makes[op_id]]
    floor, after = graph.floor_bytes.tolist(), graph.floor_after_bytes.tolist()
    workspace, cost = graph.workspace_bytes.tolist(), graph.cost_us.tolist()
    late = [0] * (graph.ops + 1)
    for at in reversed(range(graph.ops)):
        late[at] = late[at + 1] | (0 if graph.can_repeat[at] else reads[at])
    start = (0, 0, 0, 0)
    best = {start: 0.0}
    queue = [(0.0, start)]
    while queue:
        spent, state = heapq.heappop(queue)
        at, alive, fresh, loose = state
        if best[state] < spent:
            continue
        if at == graph.ops:
            return spent
        moves: list[tuple[float, tuple[int, int, int, int]]] = []
        for value in range(graph.values):
            bit = 1 << value
            if alive & bit and (not is_persistent or loose & bit or not late[at] & bit):
                moves.append((0.0, (at, alive & ~bit, fresh & ~bit, loose & ~bit)))
        if reads[at] & ~alive == 0 and bytes_of[alive | makes[at]] + floor[at] + workspace[at] <= budget_bytes:
            moves.append((0.0, (at + 1, alive | makes[at], makes[at], fresh & reads[at])))
        for op_id in repeats:
            fits = at > 0 and bytes_of[alive | makes[op_id]] + after[at - 1] + workspace[op_id] <= budget_bytes
            if op_id < at and reads[op_id] & ~alive == 0 and makes[op_id] & ~alive and fits:
                moves.append((cost[op_id], (at, alive | makes[op_id], makes[op_id], fresh & reads[op_id])))
        for more, (then, left, made, free) in moves:
            new = (then, left, made, free) if is_persistent else (then, left, 0, 0)
            if spent + more < best.get(new, math.inf):
                best[new] = spent + more
                heapq.heappush(queue, (spent + more, new))
    return math.inf
