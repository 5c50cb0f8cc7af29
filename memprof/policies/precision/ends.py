"""Computes when backward nodes, module calls and the Python frames that hold their arguments end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.precision.autocast_lists import VIEW
from memprof.policies.precision.float32 import calls_of_code
from memprof.policies.rewrite.carried import carried_over
from memprof.policies.rewrite.variables import variable_ends
from memprof.trace.schema import NONE, Ints

if TYPE_CHECKING:
    from memprof.policies.precision.flow import Types
    from memprof.trace.step import Step

_NEVER = np.iinfo(np.int64).max


class Nodes:
    """Begins and ends of a step's backward nodes and module calls.

    Attributes:
        end: Last operator of each operator's backward node, ``(ops,)``; the node's saved tensors are freed after it.
        next_start: First operator of the next node that does more than create views, ``(ops,)``; casts of a node's
            gradients run before it.
        innermost: The innermost module call of each operator, NONE outside; ``(ops,)``.
    """

    def __init__(self, step: Step, types: Types) -> None:
        """Reads them from the step."""
        forward = types.forward
        count = len(forward)
        ids = np.arange(count)
        is_end = np.append(forward[1:] != forward[:-1], True)[:count]
        ends = np.flatnonzero(is_end)
        self.end: Ints = ends[np.searchsorted(ends, ids)] if count else ids

        is_working = forward != NONE
        is_working[is_working] = types.rule[forward[is_working]] != VIEW
        working = np.flatnonzero(is_working)
        is_start = np.append(True, forward[working][1:] != forward[working][:-1])[: len(working)]
        # The run of each working operator, and the start of the following run.
        starts = np.append(working[is_start], _after_backward(types))
        run = np.cumsum(is_start)
        place = np.searchsorted(working, ids, side="right")
        # The next working operator, unless it belongs to the operator's own node: then the one after that node.
        padded = np.append(working, -1)
        upcoming = padded[np.minimum(place, len(working))]
        run_of = np.append(run - 1, len(starts) - 1)[np.minimum(place, len(working))]
        is_own = (upcoming >= 0) & (forward[upcoming] == forward)
        self.next_start: Ints = starts[np.minimum(run_of + is_own, len(starts) - 1)]

        self._calls = step.module_calls
        innermost = np.full(count, NONE, dtype=np.int64)
        calls = step.module_calls
        for row in range(len(calls)):
            if calls.first_op_id[row] != NONE and calls.last_op_id[row] != NONE:
                innermost[calls.first_op_id[row] : calls.last_op_id[row] + 1] = row
        self.innermost: Ints = innermost
        self._step = step

    def python_end(self, rows: Ints, last_read: Ints) -> Ints:
        """Returns when Python frees a storage that is not saved.

        The caller holds a module's arguments until the call returns, so the storage is freed with the outermost call
        that reads it last and began after its creation; without such a call, after its last read. The caller's own
        variable may hold it longer (``variable_ends``), and a variable that the source shows to hold it does
        (``held_op_id``): ``_`` in ``x, _ = attention(x)``.

        Args:
            rows: The storages.
            last_read: Their last forward readers.

        Returns:
            Operators after which they are freed, as long as ``rows``.
        """
        created = self._step.storages.created_op_id[rows]
        end = last_read.copy()
        call = self.innermost[last_read]
        while np.any(call != NONE):
            is_after = (call != NONE) & (self._calls.first_op_id[call] > created)
            end = np.where(is_after, np.maximum(end, self._calls.last_op_id[call]), end)
            if not is_after.any():
                break
            call = np.where(is_after, self._calls.parent_call_id[call], call)
        by_variables = variable_ends(self._step, rows, call, end)
        held = self._step.storages.held_op_id[rows]
        return np.maximum(end, np.where(held != NONE, held, by_variables))


@dataclass(frozen=True)
class KeptGraphs:
    """When graphs that outlive their backward are dropped: of ``create_graph``, or of a test loss that has none.

    Attributes:
        dropped: Operator after which the graph of each region is dropped; its last operator where backward frees it,
            NONE where it outlives the step, ``(regions,)``.
        dropped_before: Operator after which its counterpart of the step before is dropped, NONE without one.
    """

    dropped: Ints
    dropped_before: Ints


def kept_graphs(step: Step, types: Types, nodes: Nodes) -> KeptGraphs:
    """Reads from the activations saved in each region when its graph is dropped.

    A variable of the job may hold one of them longer, so the first to be freed counts.
    """
    storages, saved, count = step.storages, step.saved, len(types.region_end)
    region = types.region[saved.forward_op_id]
    rows = np.flatnonzero((region != NONE) & (storages.category[saved.storage_id] == "activation"))
    kept, region, released = saved.storage_id[rows], region[rows], saved.released_op_id[rows]
    older, _ = carried_over(step, np.isin(storages.storage_id, kept))
    dropped = _first(storages.freed_op_id[kept], region, count)
    read = types.region_end.copy()
    has_release = released != NONE
    np.maximum.at(read, region[has_release], nodes.next_start[released[has_release]])
    has_older = older[kept] != NONE
    before = _first(storages.freed_op_id[older[kept[has_older]]], region[has_older], count)
    # A backward that makes gradients of parameters frees its graph; what lives on then is held by the job itself.
    made = storages.created_op_id[(storages.category == "gradient") & (storages.created_op_id != NONE)]
    freeing = step.ops.forward_op_id[made]
    is_freed = np.isin(np.arange(count), types.region[freeing[freeing != NONE]])
    is_kept = np.isin(np.arange(count), region) & (dropped > read) & ~is_freed
    outlives = is_kept & (dropped == _NEVER)
    return KeptGraphs(
        np.where(outlives, NONE, np.where(is_kept, dropped, types.region_end)),
        np.where(outlives & (before != _NEVER), before, NONE),
    )


def _first(freed: Ints, region: Ints, count: int) -> Ints:
    first = np.full(count, _NEVER, dtype=np.int64)
    np.minimum.at(first, region, np.where(freed == NONE, _NEVER, freed))
    return first


def _after_backward(types: Types) -> int:
    backward = np.flatnonzero(types.forward != NONE)
    return int(backward[-1]) + 1 if len(backward) else len(types.forward)


def own_readers(step: Step, types: Types, nodes: Nodes, ops: Ints, sources: Ints) -> tuple[Ints, Ints]:
    """Finds what shares the casts that the job's code makes: one to float32 in a module's call, and one back.

    Args:
        step: The step.
        types: The types in it.
        nodes: Ends of its backward nodes and module calls.
        ops: Operators that read a cast.
        sources: The storage that is cast for each.

    Returns:
        The first reader of the cast that each reads, itself where autocast makes the cast; and until when the code
        holds the cast, NONE for not at all.
    """
    is_own = types.is_own[ops]
    makers = np.where(is_own, ops, np.maximum(step.storages.created_op_id[sources], 0))
    is_shared = is_own | (types.is_own[makers] & types.is_recast[sources])
    is_shared |= types.is_recast[sources] & np.isin(step.ops.stack_id[ops], list(step.in_argument_type))
    call, held_until = calls_of_code(step, makers, nodes.innermost)
    keys = np.where(is_shared, sources * (len(step.module_calls) + 1) + call + 1, -1 - ops)
    _, group = np.unique(keys, return_inverse=True)
    readers = np.full(len(ops), len(step.ops), dtype=np.int64)
    np.minimum.at(readers, group, ops)
    return readers[group], np.where(is_own, held_until, NONE)
