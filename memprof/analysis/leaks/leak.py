"""One leak: tensors of one line that stay, and what holds them."""

from __future__ import annotations

from dataclasses import dataclass

from memprof.analysis.report.sources import Sources
from memprof.trace.schema import Holders


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
