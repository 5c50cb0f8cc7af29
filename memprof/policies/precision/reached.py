"""Finds which tensors of a forward stay in float32 under autocast, or with weights in the short type."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

from memprof.policies.precision.autocast_lists import FIRST, FLOAT32, LASTING, RECURRENT, SHORT, is_one_of
from memprof.policies.rewrite.key_caches import first_values
from memprof.trace.schema import NONE, Bools, Ints

if TYPE_CHECKING:
    from memprof.trace.step import Step


def reached_by_float32(
    step: Step, rule: Ints, is_float: Bools, is_inside: Bools, is_recast: Bools, *, is_pure: bool
) -> Bools:
    """Propagates float32 from its sources: one float32 operand makes the result float32.

    Sources are tensors from outside and the results of float32 operators and factories; short operators end the path.
    A storage is float32 if it is reachable, short otherwise.
    """
    storages, uses = step.storages, step.uses
    created = storages.created_op_id
    made_rule = np.where(created != NONE, rule[created], NONE)
    # Zero-dimensional tensors do not promote those with dimensions.
    is_read = (uses.role != "write") & is_float[uses.storage_id] & (storages.shape[uses.storage_id] != "")
    is_read &= (rule[uses.op_id] != SHORT) & ~is_recast[uses.storage_id]
    is_read &= (rule[uses.op_id] != FIRST) | _is_normalized(step, rule)
    reads_op, reads_storage = uses.op_id[is_read], uses.storage_id[is_read]
    targets = np.flatnonzero(is_inside & (made_rule != SHORT) & (made_rule != FLOAT32))
    # Edges through operators: storage -> operator -> storage; operators come after the storages, then the source.
    count = len(storages)
    has_read = np.zeros(len(step.ops), dtype=np.bool_)
    has_read[reads_op] = True
    reads_recast = np.zeros(len(step.ops), dtype=np.bool_)
    reads_recast[uses.op_id[is_recast[uses.storage_id]]] = True
    is_source = is_inside & (made_rule == FLOAT32)
    is_factory = np.zeros(count, dtype=np.bool_)
    if not is_pure:
        # With short weights nothing else is float32: inputs are cast, and factories take their operands' type.
        is_source |= is_float & ~is_inside
        is_factory[targets] = ~has_read[created[targets]] & ~reads_recast[created[targets]]
    inputs, states = _first_states(step, is_factory, is_float)
    is_factory[states] = False
    sources = np.flatnonzero(is_source | is_factory)
    values = first_values(step)
    # Concatenated with an empty tensor of the keys' type, values are as wide as these.
    is_key = np.isin(uses.op_id + 1, values) & (uses.role == "read")
    start = count + len(step.ops)
    heads = np.concatenate(
        [reads_storage, count + created[targets], np.full(len(sources), start), inputs, uses.storage_id[is_key]]
    )
    tails = np.concatenate([count + reads_op, targets, sources, states, count + uses.op_id[is_key] + 1])
    graph = sparse.csr_array((np.ones(len(heads), dtype=np.int8), (heads, tails)), shape=(start + 1, start + 1))
    reached = csgraph.breadth_first_order(graph, start, return_predecessors=False)
    is_reached = np.zeros(start + 1, dtype=np.bool_)
    is_reached[reached] = True
    return is_reached[:count]


def _first_states(step: Step, is_factory: Bools, is_float: Bools) -> tuple[Ints, Ints]:
    """Pairs the inputs of recurrent layers with the zeros these begin with, which have the type of the input.

    Returns:
        Inputs and zeros, as storages.
    """
    storages, uses, calls = step.storages, step.uses, step.module_calls
    is_weight = np.isin(storages.category, LASTING)
    pairs = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))]
    is_recurrent = is_one_of(step.modules.type, RECURRENT)[calls.module_id] & (calls.first_op_id != NONE)
    for call in np.flatnonzero(is_recurrent).tolist():
        first, last = calls.first_op_id[call], calls.last_op_id[call]
        states = np.flatnonzero(is_factory & (storages.created_op_id >= first) & (storages.created_op_id <= last))
        read = np.unique(uses.storage_id[(uses.op_id >= first) & (uses.op_id <= last)])
        inputs = read[is_float[read] & ~is_weight[read] & (storages.created_op_id[read] < first)]
        pairs.append((np.repeat(inputs, len(states)), np.tile(states, len(inputs))))
    found, made = (np.concatenate(columns) for columns in zip(*pairs, strict=True))
    return found, made


def _is_normalized(step: Step, rule: Ints) -> Bools:
    """Returns which uses are a norm's normalized input, the largest tensor it reads besides weights; ``(uses,)``."""
    uses = step.uses
    is_read = (rule[uses.op_id] == FIRST) & (uses.role == "read")
    sizes = np.where(is_read, step.storages.requested_bytes[uses.storage_id], 0)
    largest = np.zeros(len(step.ops), dtype=np.int64)
    np.maximum.at(largest, uses.op_id, sizes)
    normalized: Bools = is_read & (sizes == largest[uses.op_id])
    return normalized
