"""Inserts autocast's casts: operators, the storages they allocate, and the resulting changes in lifetime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.precision.autocast_lists import FLOAT32, PROMOTE, SHORT, VIEW, is_one_of
from memprof.policies.precision.ends import kept_graphs, own_readers
from memprof.policies.precision.further_casts import cast_by_code, cast_twice, free_with_copies
from memprof.policies.rewrite.frozen import frozen_parameters
from memprof.policies.rewrite.key_caches import cache_ends
from memprof.policies.rewrite.recomputed import saved_by_unfinished_runs
from memprof.policies.rewrite.spans import find_spans
from memprof.policies.rewrite.views_read import bytes_read, reads_callers_view
from memprof.replay.rounding import rounded
from memprof.trace.schema import NONE, Bools, Ints, Ops

if TYPE_CHECKING:
    from memprof.policies.precision.ends import Nodes
    from memprof.policies.precision.flow import Types
    from memprof.policies.precision.times import Rates
    from memprof.policies.rewrite.draft import Draft
    from memprof.trace.step import Step


@dataclass(eq=False)
class Casts:
    """A step being rewritten, and the casts inserted so far.

    Attributes:
        step: The recorded step.
        types: The types in it.
        nodes: Ends of its backward nodes and module calls.
        draft: The rewritten step.
        short: Name of the short type in the trace.
        rates: Memory throughput.
        freed: Operator after which each recorded storage is freed, in ids of the draft.
    """

    step: Step
    types: Types
    nodes: Nodes
    draft: Draft
    short: str
    rates: Rates
    freed: Ints = field(init=False)

    def __post_init__(self) -> None:
        """Copies the recorded lifetimes."""
        self.freed = self.step.storages.freed_op_id.copy()

    def insert(
        self,
        sources: Ints,
        before: Ints,
        like: Ints,
        *,
        to_short: Bools,
        freed: Ints,
        category: str,
        name: str = "aten._to_copy.default",
        read: Ints | None = None,
        sizes: Ints | None = None,
    ) -> tuple[Ints, Ints]:
        """Inserts one cast for each source.

        Args:
            sources: Recorded storages to cast, which determine shape and size.
            before: Recorded operators before which the casts run.
            like: Recorded operators whose module, phase and node the casts take.
            to_short: Whether they cast to the short type, else to float32.
            freed: When the result is freed; NONE for right after the cast.
            category: Category of the result.
            name: The operator.
            read: Storages read instead of the sources, in ids of the draft.
            sizes: Bytes of the cast part in float32, where it is not the whole source.

        Returns:
            The operators and the storages, in ids of the draft.
        """
        step = self.step
        whole = step.storages.requested_bytes[sources] if sizes is None else sizes
        written = np.where(to_short, whole // 2, whole)
        rows = step.ops.take(like)
        moved = whole + whole // 2
        ops = self.draft.insert_ops(
            Ops(
                **{
                    **vars(rows),
                    "name": np.full(len(rows), name, dtype=object),
                    "kind": np.full(len(rows), "compute", dtype=object),
                    "duration_us": self.rates.cast_us(moved),
                    "flops": np.zeros(len(rows), dtype=np.int64),
                    "read_bytes": moved - written,
                    "written_bytes": written,
                    "uses_rng": np.zeros(len(rows), dtype=np.bool_),
                    "mutates": np.zeros(len(rows), dtype=np.bool_),
                    "workspace_bytes": np.zeros(len(rows), dtype=np.int64),
                }
            ),
            before,
        )
        like_storages = step.storages.take(sources)
        storages = self.draft.insert_storages(
            like_storages.replace(
                category=np.full(len(ops), category, dtype=object),
                name=np.full(len(ops), "", dtype=object),
                module_id=rows.module_id,
                requested_bytes=written,
                allocated_bytes=rounded(written, like_storages.device),
                created_op_id=ops,
                freed_op_id=np.where(freed == NONE, ops, freed),
                dtype=np.where(to_short, self.short, "float32").astype(object),
            )
        )
        self.draft.use(ops, sources if read is None else read, "read")
        self.draft.use(ops, storages, "write")
        return ops, storages

    def redirect(self, rows: Ints, storages: Ints) -> None:
        """Redirects uses, given by their rows in the recorded step, to other storages."""
        changed = self.draft.uses.storage_id.copy()
        changed[rows] = storages
        self.draft.uses = self.draft.uses.replace(storage_id=changed)

    def free(self, storages: Ints, after: Ints) -> None:
        """Changes when recorded storages are freed."""
        self.freed[storages] = after

    def settle(self) -> None:
        """Writes the lifetimes of the recorded storages into the draft."""
        self.draft.free(self.step.storages.storage_id, self.freed)


def cast_reads(casts: Casts) -> None:
    """Inserts autocast's casts: to the short type for matrix products, to float32 where required."""
    step, types = casts.step, casts.types
    uses, storages = step.uses, step.storages
    rule = types.rule[uses.op_id]
    is_read = (uses.role == "read") & types.is_float[uses.storage_id] & (types.region[uses.op_id] != NONE)
    is_short = types.is_short[uses.storage_id]
    # The float32 result of spelled-out attention is cast for all its readers, whatever their rule.
    is_handed_on = types.is_recast[uses.storage_id] & (types.attention[uses.op_id] == NONE) & (rule != VIEW)
    is_handed_on &= ~types.is_own[uses.op_id]
    to_short = is_read & ((rule == SHORT) | is_handed_on) & ~is_short
    to_float = is_read & is_short & ((rule == FLOAT32) | ((rule == PROMOTE) & ~types.is_short_out[uses.op_id]))
    to_short |= is_read & is_short & (rule == SHORT) & cast_twice(casts)
    # A recomputation that stops before a product has cast its operands: as late as backward reads them.
    is_prepared = types.is_unfinished & types.is_float[uses.storage_id] & ~is_short
    to_short |= is_prepared & (types.rule[types.origin[uses.op_id]] == SHORT)
    # A function of the job's casts by itself what it multiplies into a tensor of autocast's type, in backward too.
    writes_asked = np.zeros(len(step.ops), dtype=np.bool_)
    writes_asked[uses.op_id[(uses.role == "mutate") & types.is_asked[uses.storage_id]]] = True
    is_own_backward = writes_asked[uses.op_id] & (types.forward[uses.op_id] != NONE) & (uses.role == "read")
    to_short |= is_own_backward & types.is_float[uses.storage_id] & ~is_short & (rule == SHORT)
    rows = np.flatnonzero(to_short | to_float)
    # A trained weight is cast once per region and kept to its end; anything else, views too, is cast at every reader.
    is_weight = ((storages.category == "parameter") & ~frozen_parameters(step))[uses.storage_id[rows]]
    is_weight &= (types.region[uses.op_id[rows]] != NONE) & ~writes_asked[uses.op_id[rows]]
    is_weight &= ~reads_callers_view(step, uses.storage_id[rows], uses.op_id[rows])
    _insert_read_casts(casts, rows, is_weight, to_short[rows])


def cast_inputs(casts: Casts) -> None:
    """Casts the inputs of a model with short weights, once per call."""
    step, types = casts.step, casts.types
    uses, storages = step.uses, step.storages
    created = storages.created_op_id[uses.storage_id]
    region = types.region[uses.op_id]
    is_outside = created == NONE
    is_outside[~is_outside] = types.region[created[~is_outside]] == NONE
    is_data = ~is_one_of(storages.category, ("parameter", "buffer"))[uses.storage_id]
    is_read = (uses.role == "read") & types.is_float[uses.storage_id] & (region != NONE) & is_outside & is_data
    rows = np.flatnonzero(is_read)
    _insert_read_casts(casts, rows, np.ones(len(rows), dtype=np.bool_), np.ones(len(rows), dtype=np.bool_))


def _insert_read_casts(casts: Casts, rows: Ints, is_kept: Bools, to_short: Bools) -> None:
    """Inserts the casts of forward reads.

    Args:
        casts: The step being rewritten.
        rows: Uses redirected to a cast.
        is_kept: Whether one cast serves the whole region, else each operator has its own.
        to_short: Whether to cast to the short type.
    """
    step, types, nodes = casts.step, casts.types, casts.nodes
    uses, storages, saved = step.uses, step.storages, step.saved
    if not len(rows):
        return
    ops, sources = uses.op_id[rows], uses.storage_id[rows]
    region = types.region[ops]
    # The key of a cast: source and, unless it is kept or the job's code makes it for several readers, reader.
    places = len(step.ops) + len(types.region_end)
    readers, holders = own_readers(step, types, nodes, ops, sources)
    # In backward one cast serves the node, which holds it.
    ends = np.where(region == NONE, nodes.end[ops], NONE)
    readers, holders = np.where(region == NONE, ends, readers), np.maximum(holders, ends)
    keys = sources * places + np.where(is_kept, len(step.ops) + region, readers)
    _, first, cast_of = np.unique(keys, return_index=True, return_inverse=True)
    # Arguments are cast from last to first: bias, weight, input. The sizes reveal their order.
    order = np.lexsort((storages.requested_bytes[sources[first]], ~is_kept[first], ops[first]))
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    first, cast_of = first[order], rank[cast_of]

    # The readers save the cast, and so do their backward nodes where these are differentiated in turn.
    has_release = saved.released_op_id != NONE
    saver = np.append(types.origin, NONE)[np.where(has_release, saved.released_op_id, saved.forward_op_id)]
    saved_cast = find_spans(saved.storage_id, saver, of=sources, first=ops, last=ops)
    saved_cast = np.append(cast_of, NONE)[saved_cast]
    is_saved = (saved_cast != NONE) & ~saved_by_unfinished_runs(step, types.is_unfinished)
    released = nodes.end[saved.released_op_id]
    released = np.where(saved.released_op_id == NONE, saved.forward_op_id, released)
    last = np.where(is_kept[first], types.region_end[region[first]], ops[first])
    np.maximum.at(last, cast_of, np.maximum(ops, holders))
    np.maximum.at(last, saved_cast[is_saved], released[is_saved])
    # Backward reads of saved tensors; those of a recomputation have no record.
    reader = np.where(types.forward[uses.op_id] != NONE, types.origin[uses.op_id], NONE)
    backward_cast = np.append(cast_of, NONE)[find_spans(uses.storage_id, reader, of=sources, first=ops, last=ops)]
    is_backward = (backward_cast != NONE) & ~types.is_unfinished
    np.maximum.at(last, backward_cast[is_backward], nodes.end[uses.op_id[is_backward]])
    graphs, graph = kept_graphs(step, types, nodes), region[first]
    is_in_graph = np.isin(np.arange(len(first)), saved_cast[is_saved])
    last = np.where(is_in_graph, np.maximum(last, graphs.dropped[graph]), last)
    category = np.zeros(len(first), dtype=np.bool_)
    category[saved_cast[is_saved]] = category[backward_cast[is_backward]] = True
    read, copied_by = cast_by_code(casts, sources[first], ops[first], to_short[first])
    _, made = casts.insert(
        sources[first],
        ops[first],
        ops[first],
        to_short=to_short[first],
        read=read,
        freed=last,
        category="temporary",
        sizes=bytes_read(step, sources[first], ops[first]),
    )
    stays = np.flatnonzero(is_in_graph & (graphs.dropped[graph] == NONE))
    casts.draft.free(made[stays], NONE)
    stays = stays[graphs.dropped_before[graph[stays]] != NONE]
    casts.draft.copy_storages(made[stays], np.full(len(stays), NONE), graphs.dropped_before[graph[stays]])
    kinds = casts.draft.storages.category.copy()
    kinds[made[category]] = "activation"
    # The job's variables hold what its code casts back, not what autocast makes for an operator.
    held = casts.draft.storages.held_op_id.copy()
    held[made[~types.is_recast[sources[first]]]] = NONE
    casts.draft.storages = casts.draft.storages.replace(category=kinds, held_op_id=held)

    casts.redirect(rows, made[cast_of])
    changed = casts.draft.saved.storage_id.copy()
    changed[is_saved] = made[saved_cast[is_saved]]
    savers = np.where(is_saved & has_release, saver, casts.draft.saved.forward_op_id)
    casts.draft.saved = casts.draft.saved.replace(storage_id=changed, forward_op_id=savers)
    casts.redirect(np.flatnonzero(is_backward), made[backward_cast[is_backward]])
    is_gone = is_backward.copy()
    is_gone[rows] = False
    changed_storages = np.unique(np.concatenate([saved.storage_id[is_saved], uses.storage_id[is_backward]]))
    _let_go(casts, changed_storages, is_saved, is_gone)
    free_with_copies(casts, sources[first], ops[first], copied_by)


def _let_go(casts: Casts, storages_changed: Ints, is_recast: Bools, is_redirected: Bools) -> None:
    """Frees activations that were only kept by saved tensors, where a cast is saved instead."""
    step, types, nodes = casts.step, casts.types, casts.nodes
    storages, uses, saved = step.storages, step.uses, step.saved
    is_candidate = np.zeros(len(storages), dtype=np.bool_)
    is_candidate[storages_changed] = True
    is_candidate &= ~is_one_of(storages.category, ("parameter", "buffer"))
    is_candidate &= storages.freed_op_id != NONE
    # If it outlived all its saved-tensor records, something else kept it.
    released = np.full(len(storages), NONE, dtype=np.int64)
    has_release = saved.released_op_id != NONE
    np.maximum.at(released, saved.storage_id[has_release], nodes.next_start[saved.released_op_id[has_release]])
    is_recomputed = step.ops.is_recompute[types.origin[uses.op_id]] & (types.forward[uses.op_id] != NONE)
    np.maximum.at(released, uses.storage_id[is_recomputed], nodes.next_start[uses.op_id[is_recomputed]])
    is_candidate &= storages.freed_op_id <= released
    # Remaining holders: other records, and uses that were not redirected.
    kept = np.full(len(storages), NONE, dtype=np.int64)
    left = has_release & ~is_recast
    np.maximum.at(kept, saved.storage_id[left], nodes.end[saved.released_op_id[left]])
    is_later = (types.forward[uses.op_id] != NONE) & ~is_redirected
    np.maximum.at(kept, uses.storage_id[is_later], nodes.end[uses.op_id[is_later]])
    forward_read = np.full(len(storages), NONE, dtype=np.int64)
    is_forward = types.forward[uses.op_id] == NONE
    np.maximum.at(forward_read, uses.storage_id[is_forward], uses.op_id[is_forward])
    rows = np.flatnonzero(is_candidate & (forward_read != NONE))
    ends = np.maximum(
        nodes.python_end(rows, forward_read[rows]), cache_ends(step, types.region, types.region_end)[rows]
    )
    casts.free(rows, np.minimum(casts.freed[rows], np.maximum(ends, kept[rows])))
