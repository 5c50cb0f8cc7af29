"""One leak: tensors of one line that stay, and what holds them, also in words."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.analysis.report.sources import Sources
from memprof.trace.schema import Holders
from memprof.units import format_bytes

_KINDS = {
    "closure": "a closure",
    "exception": "an exception's traceback",
    "cache": "a cache",
    "ring": "a deque with maxlen",
    "optimizer": "an optimizer",
}


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
    """Returns one sentence on tensors that stay: their growth, age, holder and origin."""
    since = "" if leak.since_step is None else f"; kept since step {leak.since_step}"
    by = "" if leak.held_by is None else f" by {describe_holder(leak.held_by)}"
    kept = since + by if since else by and f"; kept{by}"
    return f"{describe_rate(leak)}{kept}{_describe_origin(leak)}"


def describe_rate(leak: Leak) -> str:
    """Returns how much is added, and how often: ``256.00 KiB every 2 steps``."""
    if not leak.every_steps:
        return f"{format_bytes(leak.kept_bytes)} so far"
    each = format_bytes(leak.bytes_per_step * leak.every_steps)
    return f"{each} a step" if leak.every_steps == 1 else f"{each} every {leak.every_steps} steps"


def _describe_origin(leak: Leak) -> str:
    """Returns what a leak's tensors are and where they are made, behind a comma."""
    what = " ".join(part for part in (leak.category.replace("_", " "), leak.shape, leak.dtype) if part)
    module = f" of {leak.module}" if leak.module else ""
    line = f" at {leak.line}" if leak.line else ""
    return f", {what}" + (f", made{line} by {leak.op}{module}" if leak.op else "")


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
