"""The largest individual storages live at a moment."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memprof.analysis.report.breakdown import Holding
from memprof.analysis.report.sources import SourceLine, Sources, source_to_json
from memprof.json_values import LEFT_OUT, inline, key, or_none
from memprof.trace.schema import NONE


@dataclass(frozen=True)
class LargeStorage:
    """One storage live at a moment.

    Attributes:
        allocated_bytes: Bytes after the allocator's rounding.
        requested_bytes: Requested bytes.
        category: Its category.
        name: Its parameter or buffer, "" for others.
        shape: Shape of the first tensor on it, such as ``8x128x256``; "" where no tensor was seen.
        dtype: That tensor's dtype.
        module: Qualified name of the module that owns or allocated it, None outside any module.
        module_title: The same with the root's type instead of "".
        op: Name of the operator that allocated it, None when live before the step.
        source: The user's line of code that allocated it.
        created_op_id: The operator that allocated it, None when live before the step.
        freed_op_id: The last operator run before it is freed, None when it outlives the step.
        age_ops: Operators run since its allocation, None when live before the step.
        age_us: Duration of these without the recorder, NaN where unknown.
    """

    allocated_bytes: int
    requested_bytes: int
    category: str
    name: str = field(metadata=key(convert=or_none))
    shape: str = field(metadata=key(convert=or_none))
    dtype: str = field(metadata=key(convert=or_none))
    module: str | None
    module_title: str | None = field(metadata=LEFT_OUT)
    op: str | None
    source: SourceLine | None = field(metadata=inline(source_to_json))
    created_op_id: int | None
    freed_op_id: int | None
    age_ops: int | None
    age_us: float


def find_largest(holding: Holding, sources: Sources, limit: int) -> tuple[LargeStorage, ...]:
    """Returns the largest storages of a moment, the older first on ties.

    Args:
        holding: The live memory.
        sources: Source lines of the trace's stacks.
        limit: Maximum number to return.
    """
    order = np.lexsort((holding.rows, -holding.bytes))[:limit]
    return tuple(_describe(holding, sources, place) for place in order.tolist())


def _describe(holding: Holding, sources: Sources, place: int) -> LargeStorage:
    row = int(holding.rows[place])
    step, storages, ops = holding.step, holding.step.storages, holding.step.ops
    created, freed = int(storages.created_op_id[row]), int(storages.freed_op_id[row])
    module_id = int(storages.module_id[row])
    module = None if module_id == NONE else str(step.modules.name[module_id])
    is_older = created == NONE
    return LargeStorage(
        allocated_bytes=int(storages.allocated_bytes[row]),
        requested_bytes=int(storages.requested_bytes[row]),
        category=str(storages.category[row]),
        name=str(storages.name[row]),
        shape=str(storages.shape[row]),
        dtype=str(storages.dtype[row]),
        module=module,
        module_title=module or (None if module is None else str(step.modules.type[module_id])),
        op=None if is_older else str(ops.name[created]),
        source=sources.of_stack(int(holding.stacks[place])),
        created_op_id=None if is_older else created,
        freed_op_id=None if freed == NONE else freed,
        age_ops=None if is_older else holding.op_id - created,
        age_us=float("nan") if is_older else float(ops.duration_us[created : holding.op_id].sum()),
    )
