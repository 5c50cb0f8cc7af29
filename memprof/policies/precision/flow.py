"""Propagates the short type through the forward of a step: operators that compute in it, results that have it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.precision.autocast_lists import (
    FIRST,
    FLOAT32,
    OFTEN_FLOAT32,
    OFTEN_FLOAT32_SHORT,
    SHORT,
    SIDE_RESULTS,
    VIEW,
    WIDEST,
    is_one_of,
    plain_names,
    rules,
)
from memprof.policies.precision.float32 import (
    cast_back,
    casts_to_arguments,
    made_like_short,
    may_cast,
    reached_by_float32,
    runs_float32,
)
from memprof.policies.precision.roots import holds_parameters, is_trained_root, of_trained_models
from memprof.policies.rewrite.autocast_cache import made_in_autocast_type
from memprof.policies.rewrite.recomputed import last_runs, read_of_unfinished_runs
from memprof.policies.runtime.model_roots import root_of
from memprof.trace.schema import NONE, Bools, Ints, Texts

if TYPE_CHECKING:
    from memprof.trace.step import Step


@dataclass(frozen=True, eq=False)
class Types:
    """The types of a step under autocast, or with weights in the short type.

    Attributes:
        device: ``cpu`` or ``cuda``: whose autocast lists apply.
        forward: Forward operator of each backward operator, NONE for operators recomputed in backward; ``(ops,)``.
        origin: The first operator that each goes back to by ``forward``, itself where that is NONE; ``(ops,)``. The
            backward of a backward (``create_graph``) goes back to the operator in the model's forward, that of a
            recomputed operator to its recomputed run.
        region: The call of the root module (or the recomputation) each operator runs in, NONE outside; ``(ops,)``.
        region_end: Last operator of each region.
        names: Plain operator names, ``(ops,)``.
        rule: Autocast's rule for each operator, ``(ops,)``.
        is_float: Whether a storage was recorded in float32, ``(storages,)``.
        is_short: Whether the result of a forward operator has the short type, ``(storages,)``.
        is_short_out: Whether an operator returns the short type, in backward as its origin does; ``(ops,)``.
        is_primary: Whether a storage is the largest result of the operator that allocates it, ``(storages,)``.
        has_side_results: Whether the smaller results of an operator stay in float32, ``(ops,)``.
        is_recast: Whether a float32 storage is cast to the short type for its readers: spelled-out attention's result,
            and what the job's code casts back.
        is_own: Whether an operator runs in float32 since the job's code casts its operands, ``(ops,)``.
        is_given: The same, and products, whose operands autocast casts again.
        attention: The spelled-out attention each operator is part of, NONE elsewhere; ``(ops,)``.
        is_unfinished: Whether a use is backward's of what a recomputation prepared for an operator and did not run,
            ``(uses,)``.
        is_asked: Whether the job's code makes a storage in autocast's type, in backward too; ``(storages,)``.
    """

    device: str
    forward: Ints
    origin: Ints
    region: Ints
    region_end: Ints
    names: Texts
    rule: Ints
    is_float: Bools
    is_short: Bools
    is_short_out: Bools
    is_primary: Bools
    has_side_results: Bools
    is_recast: Bools
    is_own: Bools
    is_given: Bools
    attention: Ints
    is_unfinished: Bools
    is_asked: Bools


class OwnCasts(Enum):
    """What a job casts to float32 itself: in a step recorded in float32 such a cast is a no-op and leaves no record.

    Attributes:
        NONE: Nothing.
        STAY: Operators that such jobs often run in float32; what reads their results is float32 too.
        BACK: The same, and the results are cast back before the next product, as models for short weights do.
    """

    NONE = "none"
    STAY = "stay"
    BACK = "back"


def follow_types(step: Step, *, is_pure: bool, own_casts: OwnCasts = OwnCasts.NONE) -> Types:
    """Propagates the short type through every forward of the root module.

    Args:
        step: The recorded step.
        is_pure: Whether the weights are short too.
        own_casts: What the job is assumed to cast itself.

    Raises:
        PolicyError: The step has no call of a module with parameters, or nothing in float32.
    """
    ops, storages = step.ops, step.storages
    region, region_end = _regions(step)
    names = plain_names(ops.name)
    device = "cuda" if any(str(name).startswith("cuda") for name in set(storages.device)) else "cpu"
    rule = rules(names, device, step.ops.stack_id)
    if is_pure:
        # No autocast: only norms and views keep their own rules.
        own_rules = (VIEW, FIRST, SHORT) if own_casts is OwnCasts.BACK else (VIEW, FIRST)
        rule = np.where(np.isin(rule, own_rules), rule, WIDEST)
    else:
        rule = np.where(_is_bias(step, names, region), SHORT, rule)
    if own_casts is not OwnCasts.NONE:
        # Under autocast the next product has a short result again, whatever a norm of the model's own returned.
        goes_on = own_casts is OwnCasts.STAY and is_pure
        often = OFTEN_FLOAT32 if goes_on else (*OFTEN_FLOAT32, *OFTEN_FLOAT32_SHORT)
        # Code for short weights casts further from where it computes, and in the names of settings.
        is_open = np.True_ if is_pure else may_cast(step)
        rule = np.where((rule == WIDEST) & is_one_of(names, often) & is_open, FLOAT32, rule)
    is_given = runs_float32(step, is_pure=is_pure) & (region != NONE)
    is_own = is_given & np.isin(rule, (WIDEST, FIRST, FLOAT32))
    rule = np.where(is_own, FLOAT32, rule)
    attention = _attention(step, names)
    # torch computes attention without a fused kernel in float32, and casts the result to the input type.
    rule = np.where((attention != NONE) & (rule != VIEW), FLOAT32, rule)
    is_float = storages.dtype == "float32"
    created = storages.created_op_id
    is_inside = is_float & (created != NONE)
    is_inside[is_inside] = region[created[is_inside]] != NONE
    if not np.any(is_float & (storages.category == "parameter") & of_trained_models(step)):
        raise PolicyError("precision: the recorded model has no float32 parameters to cast.")

    is_primary = _primary(step, is_float)
    has_side_results = is_one_of(names, SIDE_RESULTS)
    stays = is_inside & ~is_primary
    stays[stays] = has_side_results[created[stays]]
    if is_pure:
        # With short weights the norms' statistics are short too on a CPU.
        is_norm = (rule == FIRST)[np.maximum(created, 0)] & (device == "cpu")
        stays &= ~is_norm
    handed_on = is_recast = _handed_on(step, names, attention)
    # With short weights, factories take the type of their operands, and this is one of them.
    is_asked = np.zeros(len(storages), dtype=np.bool_) if is_pure else made_in_autocast_type(step)
    is_like = is_asked
    cast, arguments = casts_to_arguments(step)
    while True:
        reached = reached_by_float32(step, rule, is_float, is_inside, is_recast, is_like, is_pure=is_pure)
        is_short = is_inside & ~stays & ~reached
        # What is cast back makes more tensors short, and these are cast to float32 and back further on.
        found = handed_on | cast_back(step, is_own, is_short | is_recast), is_asked | made_like_short(step, is_short)
        found[0][cast] = reached[cast] & is_short[arguments]
        if np.array_equal(found, (is_recast, is_like)):
            break
        is_recast, is_like = found
    forward = _forward_of(step, region)
    origin = last_runs(step, region, _origin_of(forward))
    return Types(
        device=device,
        forward=forward,
        origin=origin,
        region=region,
        region_end=region_end,
        names=names,
        rule=rule,
        is_float=is_float,
        is_short=is_short,
        is_short_out=_short_out(step, rule, region, is_float, is_short, is_primary)[origin],
        is_primary=is_primary,
        has_side_results=has_side_results,
        is_recast=is_recast,
        is_own=is_own,
        is_given=is_given,
        attention=attention,
        is_unfinished=read_of_unfinished_runs(step, region, forward, origin),
        is_asked=is_asked,
    )


def _regions(step: Step) -> tuple[Ints, Ints]:
    """Finds the outermost model calls and the recomputations in backward: each has an autocast cache of its own."""
    calls = step.module_calls
    is_trained = is_trained_root(step)
    has_parent = calls.parent_call_id != NONE
    is_outer_recompute = calls.is_recompute & ~(has_parent & calls.is_recompute[calls.parent_call_id])
    is_region = (~has_parent & ~calls.is_recompute) | is_outer_recompute
    is_region &= is_trained[root_of(step)[calls.module_id]] & holds_parameters(step)[calls.module_id]
    rows = np.flatnonzero(is_region & (calls.first_op_id != NONE) & (calls.last_op_id != NONE))
    if not len(rows):
        raise PolicyError("precision: no module with parameters is called in the recorded step.")
    region = np.full(len(step.ops), NONE, dtype=np.int64)
    for number, row in enumerate(rows):
        region[calls.first_op_id[row] : calls.last_op_id[row] + 1] = number
    return _with_functions(step, region, calls.last_op_id[rows])


def _with_functions(step: Step, region: Ints, region_end: Ints) -> tuple[Ints, Ints]:
    """Extends recomputations to operators around their modules: a checkpoint may run any function again.

    Args:
        step: The step.
        region: The region of each operator, NONE outside, ``(ops,)``.
        region_end: The last operator of each.
    """
    is_again = step.ops.is_recompute
    begins = is_again & ~np.append(False, is_again[:-1])
    run = np.where(is_again, np.cumsum(begins) - 1, NONE)
    inside = np.flatnonzero((run != NONE) & (region != NONE))
    last = len(step.ops)
    # Regions of modules that one run recomputes are one: the first of them.
    first_of = np.full(int(run.max(initial=NONE)) + 1, last, dtype=np.int64)
    np.minimum.at(first_of, run[inside], region[inside])
    joined = np.arange(len(region_end))
    joined[region[inside]] = np.minimum(joined[region[inside]], first_of[run[inside]])
    found = np.where(region == NONE, NONE, joined[region])
    alone = np.flatnonzero((run != NONE) & (region == NONE))
    alone = alone[first_of[run[alone]] < last]
    found[alone] = first_of[run[alone]]
    numbers, found[found != NONE] = np.unique(found[found != NONE], return_inverse=True)
    ends = np.full(len(numbers), NONE, dtype=np.int64)
    np.maximum.at(ends, found[found != NONE], np.flatnonzero(found != NONE))
    return found, ends


def _forward_of(step: Step, region: Ints) -> Ints:
    """Returns the forward operator of each backward operator, NONE for operators recomputed in backward.

    A trace names none for a node whose operator works in place and saves a copy of its input (``hardswish_``). The
    backward operator reads that copy, so the operator that made the copy is returned instead.
    """
    ops, uses, created = step.ops, step.uses, step.storages.created_op_id
    found = np.where(region != NONE, NONE, ops.forward_op_id)
    is_orphan = (ops.phase == "backward") & (found == NONE) & (region == NONE)
    maker = created[uses.storage_id]
    rows = np.flatnonzero(is_orphan[uses.op_id] & (uses.role == "read") & (maker != NONE))
    rows = rows[region[maker[rows]] != NONE]
    np.maximum.at(found, uses.op_id[rows], maker[rows])
    return found


def _origin_of(forward: Ints) -> Ints:
    """Follows each operator's forward operator to the first one, shape ``(ops,)``."""
    origin = np.where(forward == NONE, np.arange(len(forward)), forward)
    while np.any(origin[origin] != origin):
        origin = origin[origin]
    return origin


def _primary(step: Step, is_float: Bools) -> Bools:
    """Returns which storage is the largest float32 result of its operator."""
    storages = step.storages
    made = np.flatnonzero(is_float & (storages.created_op_id != NONE))
    order = made[np.lexsort((storages.requested_bytes[made], storages.created_op_id[made]))]
    is_primary = np.zeros(len(storages), dtype=np.bool_)
    is_last = np.append(np.diff(storages.created_op_id[order]) != 0, True)[: len(order)]
    is_primary[order[is_last]] = True
    return is_primary


def _is_bias(step: Step, names: Texts, region: Ints) -> Bools:
    """Finds the additions of a linear layer's bias: after a product, on the same line of Python.

    Autocast casts weight and bias of ``linear`` together, above the operators that a trace holds.
    """
    ops, uses, storages = step.ops, step.uses, step.storages
    is_bias = np.zeros(len(names), dtype=np.bool_)
    is_vector = storages.category == "parameter"
    is_vector[is_vector] = np.char.count(storages.shape[is_vector].astype(str), "x") == 0
    reads_vector = np.zeros(len(names), dtype=np.bool_)
    reads_vector[uses.op_id[is_vector[uses.storage_id]]] = True
    rows = np.flatnonzero((names == "add") & reads_vector & (region != NONE))
    rows = rows[rows >= 2]
    is_behind = (names[rows - 1] == "_unsafe_view") & (names[rows - 2] == "mm")
    is_bias[rows[is_behind & (ops.stack_id[rows] == ops.stack_id[rows - 2])]] = True
    return is_bias


def _attention(step: Step, names: Texts) -> Ints:
    """Finds attention run as single operators: scaling, a product, a safe softmax, dropout, a product.

    Returns:
        The number of each such run of operators, NONE for all others; ``(ops,)``.
    """
    part = np.full(len(names), NONE, dtype=np.int64)
    softmax = np.flatnonzero(names == "_safe_softmax")
    products = np.flatnonzero(names == "bmm")
    scalings = np.flatnonzero(step.ops.name == "aten.mul.Scalar")
    after = np.searchsorted(products, softmax)
    for number, (middle, following) in enumerate(zip(softmax, after, strict=True)):
        if following == 0 or following == len(products):
            continue
        begin = products[following - 1]
        # Query and key are each multiplied by the square root of the scale, a few views before their product.
        scaled = scalings[max(0, np.searchsorted(scalings, begin) - 2) : np.searchsorted(scalings, begin)]
        if len(scaled) == 2 and begin - scaled[0] <= 12:
            begin = scaled[0]
        if products[following] - middle <= 16:
            part[begin : products[following] + 1] = number
    return part


def _handed_on(step: Step, names: Texts, attention: Ints) -> Bools:
    """Finds the result of such attention: its last matrix product."""
    is_result = np.zeros(len(step.storages), dtype=np.bool_)
    products = np.flatnonzero((attention != NONE) & (names == "bmm"))
    if not len(products):
        return is_result
    last = products[np.append(np.diff(attention[products]) != 0, True)]
    created = step.storages.created_op_id
    handed_on: Bools = np.isin(created, last) & (step.storages.dtype == "float32")
    return handed_on


def _short_out(step: Step, rule: Ints, region: Ints, is_float: Bools, is_short: Bools, is_primary: Bools) -> Bools:
    """Returns whether the result of each forward operator is short."""
    created, uses = step.storages.created_op_id, step.uses
    out = np.zeros(len(step.ops), dtype=np.bool_)
    makes = np.zeros(len(step.ops), dtype=np.bool_)
    primary = np.flatnonzero(is_primary)
    makes[created[primary]] = True
    out[created[primary]] = is_short[primary]
    # A view has the type of its input, an in-place operator that of its target.
    is_followed = is_float[uses.storage_id] & ~makes[uses.op_id]
    is_followed &= (uses.role == "mutate") | (rule[uses.op_id] == VIEW)
    rows = np.flatnonzero(is_followed)
    out[uses.op_id[rows]] = is_short[uses.storage_id[rows]]
    short: Bools = out & (region != NONE)
    return short
