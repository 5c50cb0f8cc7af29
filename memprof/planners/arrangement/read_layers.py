"""Reads what each layer holds, passes on and takes off a recorded step of one device."""

from __future__ import annotations

import itertools

import numpy as np

from memprof.errors import PolicyError
from memprof.planners.arrangement.layer_costs import LayerCosts
from memprof.policies.accumulate.batch import find_batch
from memprof.policies.accumulate.scale import CALL_US
from memprof.policies.shard.division import ROOT, choose_units, find_units
from memprof.replay.live import alive_at, sum_during
from memprof.trace.operator_facts import ATTENTION_WORDS, CAST, have_word
from memprof.trace.schema import NONE, Bools, Floats, Ints, Texts, read_shape
from memprof.trace.step import Step, sum_at

#: Storages that are not made anew for each micro-batch.
_STATE = ("parameter", "gradient", "optimizer_state", "buffer", "input")


def read_layers(step: Step) -> LayerCosts:
    """Returns the costs of each layer of a recorded step of one device.

    Args:
        step: The step, of a single rank and of one micro-batch.

    Raises:
        PolicyError: The step has several micro-batches, or its layers do not run one after the other.
    """
    ops, storages = step.ops, step.storages
    if len(np.unique(ops.micro_batch[np.isin(ops.phase, ("forward", "backward"))])) > 1:
        raise PolicyError(
            "the recorded step accumulates several micro-batches, which an arrangement chooses itself: record the job "
            "without accumulation."
        )
    if (ops.kind == "collective").any():
        raise PolicyError("the recorded job communicates with other ranks already: record it on one device.")
    layers = _layer_names(step)
    names, unit_of_module, starts = _units(step, layers)
    count = len(names)
    forward, backward = _spans(step, layers, starts, count)
    owner = np.append(unit_of_module, 0)[storages.module_id]
    is_parameter = storages.category == "parameter"
    is_vector = np.char.find(storages.shape.astype(str), "x") < 0
    is_expert = np.append(_expert_modules(step.modules.name), np.bool_(False))[storages.module_id]
    is_cast, cast_of = _casts(step, is_parameter, owner)

    def by_unit(chosen: Bools, units: Ints = owner) -> Floats:
        return np.bincount(units[chosen], storages.allocated_bytes[chosen], count).astype(np.float64)

    casts = by_unit(is_cast, cast_of)
    recast = np.zeros(len(storages), dtype=np.bool_)
    recast[_sources(step, is_cast, is_parameter)] = True
    is_made = ~np.isin(storages.category, _STATE) & (storages.created_op_id != NONE) & ~is_cast
    made = _during(step, is_made) + ops.workspace_bytes
    after = _after(step, is_made)
    gradients, is_born = storages.category == "gradient", storages.created_op_id != NONE
    own_gradients = [_during(step, gradients & is_born & (owner == unit)) for unit in range(count)]
    held, highest_forward, highest_backward, highest_first = _levels(made, after, own_gradients, forward, backward)
    times = np.nan_to_num(ops.duration_us)
    times *= step.duration_us / max(1e-9, float(times.sum()))  # Python's own time is that of the operators it runs
    is_update = ops.phase == "optimizer"
    is_attention = have_word(ops.name, ATTENTION_WORDS) & (ops.phase == "forward")
    spans = {"forward": forward, "backward": backward}

    def over(phase: str, values: Floats | Ints | Bools) -> Floats:
        own = np.where(ops.phase == phase, values, 0)
        return np.array([float(own[first:end].sum()) for first, end in spans[phase]])

    at_start = alive_at(step, forward[0][0])
    update = _during(step, is_made & (np.append(is_update, np.bool_(False))[storages.created_op_id]))
    matrices = storages.shape[is_parameter & ~is_vector]
    return LayerCosts(
        names=tuple(names),
        samples=_samples(step),
        parameter_bytes=by_unit(is_parameter),
        undivided_bytes=by_unit(is_parameter & is_vector),
        expert_bytes=by_unit(is_parameter & is_expert),
        gradient_bytes=np.maximum(by_unit(gradients & is_born), by_unit(gradients & ~is_born)),
        state_bytes=by_unit(storages.category == "optimizer_state"),
        cast_bytes=casts,
        gathered_bytes=casts + by_unit(is_parameter & ~recast),
        held_bytes=held,
        forward_bytes=highest_forward,
        backward_bytes=highest_backward,
        first_backward_bytes=highest_first,
        boundary_bytes=_boundaries(step, is_made, forward),
        forward_us=over("forward", times),
        backward_us=over("backward", times),
        attention_us=over("forward", np.where(is_attention, times, 0.0)),
        forward_call_us=over("forward", np.minimum(times, CALL_US)),
        backward_call_us=over("backward", np.minimum(times, CALL_US)),
        attention_bytes=over("forward", np.where(is_attention, ops.read_bytes * 2 / 3, 0.0)),
        dispatched_bytes=over("forward", _returned_by_experts(step)),
        update_us=float(times[~np.isin(ops.phase, ("forward", "backward"))].sum()),
        update_bytes=int(update[is_update].max(initial=0)),
        other_bytes=int(storages.allocated_bytes[storages.category == "buffer"].sum()),
        input_bytes=int(storages.allocated_bytes[(storages.category == "input") & at_start].sum()),
        keeps_gradients=bool((gradients & at_start & (storages.freed_op_id != forward[0][0])).any()),
        adds_gradients=bool((gradients & ~is_born & alive_at(step, backward[-1][0])).any()),
        sizes=tuple(sorted({max(read_shape(shape)) for shape in matrices})),
    )


def _samples(step: Step) -> int:
    try:
        return find_batch(step).size
    except PolicyError:
        return 1  # a single sample: it cannot be divided


def _units(step: Step, layers: dict[str, int]) -> tuple[list[str], Ints, Ints]:
    """Returns the units' names, the unit of each module, and the first forward operator of each layer."""
    modules = step.modules
    found = find_units(step, ())
    order = [unit for unit in np.argsort(found.first_forward, kind="stable").tolist() if unit != ROOT]
    order = [unit for unit in order if found.last_forward[unit] != NONE]
    last = found.last_forward[order]
    if (found.first_forward[order][1:] <= last[:-1]).any():
        order = []  # a layer runs inside another, or again after it: no cut between them
    number = np.zeros(found.count, dtype=np.int64)
    number[order] = np.arange(1, len(order) + 1)
    chosen: list[str] = [""] * (len(order) + 2)
    of_module = np.zeros(len(modules), dtype=np.int64)
    for row, (name, parent) in enumerate(zip(modules.name.tolist(), modules.parent_id.tolist(), strict=True)):
        own = number[layers[name]] if name in layers else 0
        of_module[row] = own or (of_module[parent] if parent != NONE else 0)
        if own:
            chosen[own] = str(name)
    chosen[0], chosen[-1] = "before the layers", "after the layers"
    starts = found.first_forward[order]
    _put_after(step, of_module, last[-1] if order else NONE, len(order) + 1)
    return chosen, of_module, starts


def _layer_names(step: Step) -> dict[str, int]:
    """Returns the number of each layer's unit, as find_units counts them."""
    modules = step.modules
    names = [str(name) for name in modules.name]
    chosen = choose_units((), names, modules.type.tolist(), modules.parent_id.tolist())
    return {name: row for row, name in enumerate(chosen, start=1)}


def _put_after(step: Step, of_module: Ints, last_op: int, last_unit: int) -> None:
    """Assigns modules outside the layers that first run after them to the last unit."""
    ops = step.ops
    inside = np.flatnonzero((ops.phase == "forward") & (ops.module_id != NONE))
    first = np.full(len(of_module), len(ops), dtype=np.int64)
    np.minimum.at(first, ops.module_id[inside], inside)
    runs = first < len(ops)
    of_module[(of_module == 0) & runs & (first > last_op) & (last_op != NONE)] = last_unit


def _spans(
    step: Step, layers: dict[str, int], starts: Ints, count: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns the operators of each unit's forward and backward: first, and the one after its last.

    Between the first operators of two layers everything belongs to the earlier one, in forward and in backward.
    """
    ops = step.ops
    owned = np.flatnonzero(ops.phase == "forward")
    late = np.flatnonzero(ops.phase == "backward")
    if not len(owned) or not len(late):
        raise PolicyError("the recorded step has no forward and backward: nothing can be arranged over devices.")
    begin, turn, end = int(owned[0]), int(late[0]), int(late[-1]) + 1
    if not len(starts):
        return [(begin, turn), (turn, turn)], [(turn, end), (turn, turn)]
    # What follows the last layer starts after its last operator.
    of_layer = np.zeros(len(ops), dtype=np.bool_)
    prefix = tuple(f"{name}." for name in layers)
    is_inside = np.array([name in layers or str(name).startswith(prefix) for name in step.modules.name])
    of_layer[ops.module_id != NONE] = is_inside[ops.module_id[ops.module_id != NONE]]
    last = int(np.flatnonzero(of_layer & (ops.phase == "forward"))[-1]) + 1
    edges = [begin, *starts.tolist(), last, turn]
    forward = list(itertools.pairwise(edges))
    # A backward operator belongs to the unit of its forward operator; the first of each unit is where it starts.
    unit_of_op = np.searchsorted(np.array(edges[1:-1]), np.arange(len(ops)), side="right")
    sources = ops.forward_op_id[late]
    known = (sources != NONE) & (sources >= begin)
    first = np.full(count, end, dtype=np.int64)
    np.minimum.at(first, unit_of_op[sources[known]], late[known])
    first[-1] = turn
    for unit in reversed(range(count - 1)):  # the later unit's backward comes first
        first[unit] = max(first[unit], first[unit + 1])
    ends = [end, *first[:-1].tolist()]
    return forward, [(int(start), int(stop)) for start, stop in zip(first, ends, strict=True)]


def _levels(
    made: Ints, after: Ints, gradients: list[Ints], forward: list[tuple[int, int]], backward: list[tuple[int, int]]
) -> Floats:
    """Returns what each unit holds, and its peaks above what the earlier ones hold. Shape (4, units).

    The peaks are those in forward, in backward, and in backward with the unit's gradients.
    """
    begin = forward[0][0]
    base = float(after[begin - 1]) if begin else 0.0
    found = []
    for (first, end), (late, late_end), own in zip(forward, backward, gradients, strict=True):
        levels = made[first:end], made[late:late_end], made[late:late_end] + own[late:late_end]
        held = (float(after[end - 1]) if end > first else base) - base
        found.append([held, *(max(0.0, float(level.max(initial=0)) - base) for level in levels)])
        base += held
    return np.array(found).T


def _boundaries(step: Step, is_made: Bools, forward: list[tuple[int, int]]) -> Floats:
    """Returns the bytes that forward makes in or before each unit and reads after it."""
    storages, uses = step.storages, step.uses
    read = (uses.role != "write") & (step.ops.phase[uses.op_id] == "forward")
    last = np.full(len(storages), NONE, dtype=np.int64)
    np.maximum.at(last, uses.storage_id[read], uses.op_id[read])
    crossing = []
    for _, end in forward:
        passes = is_made & (storages.created_op_id < end) & (last >= end)
        crossing.append(float(storages.allocated_bytes[passes].sum()))
    return np.array(crossing)


def _casts(step: Step, is_parameter: Bools, owner: Ints) -> tuple[Bools, Ints]:
    """Returns which storages are copies of a parameter that forward makes, and the unit of the parameter."""
    storages, uses = step.storages, step.uses
    unit = np.zeros(len(storages), dtype=np.int64)
    copies = np.flatnonzero((step.ops.name == CAST) & (step.ops.phase == "forward"))
    source = np.full(len(step.ops), NONE, dtype=np.int64)
    read = (uses.role == "read") & is_parameter[uses.storage_id]
    source[uses.op_id[read]] = uses.storage_id[read]
    copying = np.zeros(len(step.ops) + 1, dtype=np.bool_)
    copying[copies[source[copies] != NONE]] = True
    is_cast = copying[storages.created_op_id] & (storages.created_op_id != NONE)
    unit[is_cast] = owner[source[storages.created_op_id[is_cast]]]
    return is_cast, unit


def _sources(step: Step, is_cast: Bools, is_parameter: Bools) -> Ints:
    """Returns the parameters that are copied to another type."""
    makers = step.storages.created_op_id[is_cast]
    read = np.isin(step.uses.op_id, makers) & is_parameter[step.uses.storage_id]
    return np.unique(step.uses.storage_id[read])


def _expert_modules(names: Texts) -> Bools:
    """Returns which modules are experts, or inside one: in a list or module named so."""
    return np.array(["experts" in str(name).split(".") for name in names], dtype=np.bool_)


def _returned_by_experts(step: Step) -> Floats:
    """Returns the bytes that calls of experts return, at their last operator. Shape (ops,)."""
    calls, modules = step.module_calls, step.modules
    is_expert = _expert_modules(modules.name)
    parents = modules.parent_id
    # A list of experts does not run itself: its members are the outermost that do.
    parts = [str(name).split(".") for name in modules.name]
    outermost = np.array(
        [
            bool(inside) and (parts[row][-1] == "experts" or parts[row][-2:-1] == ["experts"])
            for row, inside in enumerate(is_expert)
        ],
        dtype=np.bool_,
    )
    found = np.zeros(len(step.ops), dtype=np.float64)
    called = set(calls.module_id.tolist())
    for module, last in zip(calls.module_id.tolist(), calls.last_op_id.tolist(), strict=True):
        nested = parents[module] != NONE and outermost[parents[module]] and parents[module] in called
        if outermost[module] and not nested and last != NONE and step.ops.phase[last] == "forward":
            found[last] += step.ops.written_bytes[last]
    return found


def _during(step: Step, chosen: Bools) -> Ints:
    return sum_during(step.storages.take(chosen), len(step.ops))


def _after(step: Step, chosen: Bools) -> Ints:
    storages = step.storages.take(chosen)
    freed = sum_at(storages.freed_op_id, storages.allocated_bytes, len(step.ops))
    after: Ints = _during(step, chosen) - freed
    return after
