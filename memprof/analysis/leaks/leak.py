"""One leak: tensors of one line that stay, what holds them, and those found over a whole run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memprof.analysis.leaks.growth import Growth
from memprof.analysis.report.sources import Sources, find_sources
from memprof.trace.files.spool import ARRAY, OBJECTS
from memprof.trace.schema import NONE, Bools, Holders, Modules, Stacks
from memprof.trace.store import Trace
from memprof.units import format_bytes

_KINDS = {
    "closure": "a closure",
    "exception": "an exception's traceback",
    "cache": "a cache",
    "ring": "a deque with maxlen",
    "optimizer": "an optimizer",
}
#: Lines last stated in the first half of a run are of a leak if they make up no more than this share of the growth.
_MOST_OF_GROWTH = 1.25
#: What other lines leave of the growth is no leak of its own below this share.
_LEAST_OF_GROWTH = 0.02
#: Shape, element type, device, and whether they have an autograd graph.
_Kind = tuple[str, str, str, bool]


@dataclass(frozen=True)
class HeldBy:
    """What keeps tensors alive.

    Attributes:
        kind: As in the table of holders.
        chain: The references from a variable to a tensor.
        container: Type of the object that the variable refers to.
        place: File and line of the variable, "" where unknown.
        is_by_graph: The tensor at the end of the chain does not refer to the memory itself: its autograd graph does.
    """

    kind: str
    chain: str
    container: str
    place: str
    is_by_graph: bool


@dataclass(frozen=True)
class Leak:
    """Tensors of one line of code of which there are more after every step.

    Attributes:
        bytes_per_step: Growth per step.
        kept_bytes: Their bytes at the end of the observation.
        tensors: How many there are.
        since_step: Step in which the oldest was made; None if before the recording.
        category: Category of most of their bytes.
        shape: Shape of the largest.
        dtype: Its element type.
        op: Operator that made it, "" where unknown.
        module: Its module, "" outside any.
        line: Line of the user's code that made it, "" where unknown.
        every_steps: In every how many steps tensors are added; 0 where that is undecided.
        held_by: What keeps it alive; None where unknown.
    """

    bytes_per_step: int
    kept_bytes: int
    tensors: int
    since_step: int | None
    category: str
    shape: str
    dtype: str
    op: str
    module: str
    line: str
    every_steps: int
    held_by: HeldBy | None


def held_by(holders: Holders, row: int, sources: Sources, *, is_by_graph: bool) -> HeldBy:
    """Returns a row of the table of holders."""
    line = sources.of_stack(int(holders.stack_id[row]))
    return HeldBy(
        kind=str(holders.kind[row]),
        chain=str(holders.chain[row]),
        container=str(holders.container[row]),
        place="" if line is None else line.place,
        is_by_graph=is_by_graph,
    )


def describe_leak(leak: Leak) -> str:
    """Returns what the tensors that stay are: ``8.00 KiB a step; kept since step 2: activation 64x8 float32 of fc``."""
    category = "" if leak.category in ("temporary", "unknown") else leak.category.replace("_", " ")
    since = "" if leak.since_step is None else f"; kept since step {leak.since_step}"
    by, module = f"by {leak.op}" if leak.op else "", f"of {leak.module}" if leak.module else ""
    what = " ".join(part for part in (category, leak.shape, leak.dtype, by, module) if part)
    return f"{describe_rate(leak)}{since}: {what}"


def variable_of(chain: str) -> str:
    """Returns the variable that a holder's chain begins with, up to its first index."""
    return chain.partition("[")[0]


def describe_rate(leak: Leak) -> str:
    """Returns how much is added: ``128.00 KiB a step (every 2 steps)``."""
    if not leak.every_steps:
        return f"{format_bytes(leak.kept_bytes)} so far"
    rhythm = f" (every {leak.every_steps} steps)" if leak.every_steps > 1 else ""
    return f"{format_bytes(leak.bytes_per_step)} a step{rhythm}"


def describe_cause(leak: Leak) -> str:
    """Returns the line that makes what stays, and what holds it: ``made at train.py:9, held by `losses[2]` (list)``."""
    what = f"{leak.shape} {leak.dtype}".strip()
    made = f"made at {leak.line}" if leak.line else f"made by {leak.op}" if leak.op else what
    return f"{made}, held by {'unknown' if leak.held_by is None else describe_holder(leak.held_by)}"


def describe_holder(held: HeldBy) -> str:
    """Returns what holds a tensor: ``losses[0]`` (list) in train.py:8."""
    if not held.chain:
        return "something outside Python's references"
    graph = "the autograd graph of " if held.is_by_graph else ""
    through = f", through {_KINDS[held.kind]}" if held.kind in _KINDS else ""
    if held.kind == "cycle":
        through = ", in a reference cycle, which only Python's garbage collector frees"
    place = f" in {held.place}" if held.place else ""
    return f"{graph}`{held.chain}` ({held.container}){place}{through}"


def leaks_of_run(trace: Trace, growth: Growth) -> list[Leak]:
    """Finds the kinds of tensors of which Python held more at each statement over a run, by line where it is known.

    Returns:
        The leaks. What is not made in every step has what the lines made in each leave of the growth.
    """
    holders, sources = trace.table(Holders), find_sources(trace.table(Stacks))
    of_kinds = (holders.made_step == NONE) & ~is_of_host(holders)
    kinds = leaks_of_kinds(holders.take(of_kinds), sources, growth.last_step)
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
    modules = trace.table(Modules)
    steady: list[Leak] = []
    rare: list[Leak] = []
    for place, rows in latest.items():
        chains = [row for row in by_line[place] if followed.chain[row]]
        chains.sort(key=lambda row: followed.stack_id[row] == NONE)  # at the end of a run, a variable's line is unknown
        held = None
        if chains:
            held = held_by(followed, chains[0], sources, is_by_graph=bool(followed.is_by_graph[chains[0]]))
            alike = kinds.get(_kind(followed, rows[0]))
            if not held.place and alike is not None and alike.held_by is not None:
                is_same = variable_of(held.chain) == variable_of(alike.held_by.chain)
                held = replace(held, place=alike.held_by.place if is_same else "")
        leak = _of_line(modules, followed, rows, kinds, by_kind, place, held)
        (steady if leak.bytes_per_step else rare).append(leak)
    rare += [leak for kind, leak in kinds.items() if kind not in by_kind]
    if growth.bytes_per_step is None or growth.follows_inputs:
        return [*steady, *(replace(leak, every_steps=0) for leak in rare)]
    left = growth.bytes_per_step - sum(leak.bytes_per_step for leak in steady)
    kept = max(sum(leak.kept_bytes for leak in rare), 1)
    shared = [replace(leak, bytes_per_step=round(left * leak.kept_bytes / kept)) for leak in rare]
    shared = [leak for leak in shared if leak.bytes_per_step > _LEAST_OF_GROWTH * growth.bytes_per_step]
    # How often, by the bytes of one tensor.
    often = [leak.kept_bytes / max(leak.tensors, 1) / leak.bytes_per_step for leak in shared]
    return [*steady, *(replace(leak, every_steps=max(1, round(n))) for leak, n in zip(shared, often, strict=True))]


def is_of_host(holders: Holders) -> Bools:
    """Returns which rows are on main memory that torch's allocator does not own. Shape ``(rows,)``."""
    return np.array([dtype == OBJECTS or dtype.startswith(ARRAY) for dtype in holders.dtype.tolist()], dtype=bool)


def leaks_of_host(trace: Trace) -> list[Leak]:
    """Finds the kinds of tensors in main memory, arrays and Python objects that become more over the whole run.

    Returns:
        Those of most bytes first.
    """
    holders = trace.table(Holders)
    kinds = holders.take((holders.made_step == NONE) & (holders.tensors > 0) & (holders.device == "cpu"))
    # What there is at the job's end has other holders than before, or none.
    last = int(holders.step.max(initial=0))
    found = leaks_of_kinds(kinds, find_sources(trace.table(Stacks)), last)
    return sorted(found.values(), key=lambda leak: -leak.kept_bytes)


def leaks_of_kinds(holders: Holders, sources: Sources, last_step: int) -> dict[_Kind, Leak]:
    """Finds the kinds of tensors that become more from the first statement on them to the last.

    Args:
        holders: Statements on kinds, each with how many there were.
        sources: Lines of the recording.
        last_step: Last step of the run.
    """
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
        half = max((step for step in rows if 2 * step <= max(rows)), default=None)
        has_ended = half is not None and holders.tensors[last] <= holders.tensors[rows[half]]
        if grown <= 0 or has_ended or int(holders.step[last]) < last_step // 2:
            continue
        own = [row for row in range(len(holders)) if holders.chain[row] and _kind(holders, row) == kind]
        own.sort(key=lambda row: (holders.stack_id[row] == NONE, -holders.step[row]))  # as above
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
    """Returns the bytes that a line adds in each step; 0 where it does not in two steps in a row."""
    steps, sizes = followed.made_step[rows], followed.total_bytes[rows]
    if 1 not in np.diff(np.unique(steps)):
        return 0
    return int(np.median([int(sizes[steps == step].sum()) for step in set(steps.tolist())]))


def _kind(holders: Holders, row: int) -> _Kind:
    return (
        str(holders.shape[row]),
        str(holders.dtype[row]),
        str(holders.device[row]),
        bool(holders.has_graph[row]),
    )
