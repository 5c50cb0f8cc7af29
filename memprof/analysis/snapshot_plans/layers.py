"""Activation checkpointing of repeated layers: what their calls save is freed, and allocated again in backward."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import numpy as np

from memprof.analysis.report.sources import find_sources
from memprof.analysis.snapshot_plans.change import Change
from memprof.errors import PolicyError
from memprof.policies.rewrite.draft import Draft
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step

#: Layers that save less than this share of all activations are not worth a plan.
_LEAST_SHARE = 0.02


@dataclass(frozen=True, eq=False)
class Layers:
    """Repeated layers of one class: modules that one line of the module around them calls in turn.

    Attributes:
        name: Name of their module around and of their class.
        kind: Their class, or the file and line of its forward.
        place: File and line of a call's first allocation, "" where unknown.
        modules: The layers in the order of their calls.
        saved_bytes: What their calls keep for backward, without the outputs that the next layer gets.
    """

    name: str
    kind: str
    place: str
    modules: tuple[int, ...]
    saved_bytes: int


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a layer in forward.

    Attributes:
        first: Its first operator.
        last: Its last one.
        made: Storages that it makes.
        saved: Those that only backward frees, without its output; where the step ends before, those that it would.
        inputs: Storages of its output's size that are alive when it begins, and that forward frees behind that.
    """

    first: int
    last: int
    made: Ints
    saved: Ints
    inputs: Ints


def find_layers(step: Step) -> list[Layers]:
    """Returns the repeated layers of a step whose calls keep something for backward, those that keep most first."""
    calls = step.module_calls
    groups: dict[str, list[int]] = defaultdict(list)
    for module in np.unique(calls.module_id[~calls.is_recompute]).tolist():
        name, _, number = str(step.modules.name[module]).rpartition(".")
        if name and number.isdecimal():
            groups[name].append(module)
    sources = find_sources(step.stacks)
    found = []
    for name, modules in groups.items():
        if len(modules) < 2:
            continue
        own = _calls(step, modules)
        saved = sum(int(step.storages.allocated_bytes[call.saved].sum()) for call in own)
        source = sources.of_stack(int(step.ops.stack_id[own[0].first])) if own else None
        place = source.place if source is not None else ""
        found.append(Layers(name, str(step.modules.type[modules[0]]), place, tuple(modules), saved))
    activations = int(step.storages.allocated_bytes[step.storages.category == "activation"].sum())
    worth = [one for one in found if one.saved_bytes > _LEAST_SHARE * activations]
    return sorted(worth, key=lambda one: -one.saved_bytes)


def checkpoint_change(layers: Layers, count: int) -> Change:
    """Returns the change that checkpoints the first layers of a class."""
    how_many = f"all {count}" if count == len(layers.modules) else f"{count} of {len(layers.modules)}"
    place = f", whose forward is in {layers.place}" if layers.place else ""
    return Change(
        policy="checkpoint",
        what=f"checkpoint {how_many} {layers.kind}",
        advice=f"torch.utils.checkpoint.checkpoint(layer, ..., use_reentrant=False) around each layer{place}",
        numerics="none",
        transform=partial(checkpointed, modules=layers.modules[:count]),
        errors=(0.07, 0.06),
    )


def checkpointed(step: Step, modules: tuple[int, ...]) -> Step:
    """Frees what calls of layers save at their ends, and makes it again before backward reads it.

    Their inputs are kept until then, even where the layer itself keeps a copy of them, such as a transposed one.

    Raises:
        PolicyError: Their calls save nothing.
    """
    calls = [call for call in _calls(step, modules) if len(call.saved)]
    if not calls:
        raise PolicyError("the calls of these layers keep nothing for backward.")
    draft = Draft(step)
    freed, created = step.storages.freed_op_id, step.storages.created_op_id
    for call in calls:
        if (freed[call.saved] == NONE).all():  # the step ends before backward gets there
            draft.free(call.saved, call.last)
            draft.free(call.inputs, NONE)
            continue
        again = _made_again(step, call)
        until = int(created[call.saved].max())
        rows = np.arange(call.first, until + 1)
        copies = np.full(len(step.ops) + 1, NONE, dtype=np.int64)
        copies[rows] = draft.repeat_ops(rows, np.full(len(rows), again))
        made = call.made[created[call.made] <= until]
        is_saved: Bools = np.isin(made, call.saved)
        # What a call does not save is freed inside it, and what it returns with the end of the repetition.
        ends = np.minimum(np.where(freed[made] == NONE, until, freed[made]), until)
        draft.copy_storages(made, copies[created[made]], np.where(is_saved, freed[made], copies[ends]))
        draft.free(call.saved, call.last)
        kept = np.maximum(draft.storages.freed_op_id[call.inputs], freed[call.saved].max())
        draft.free(call.inputs, NONE if (freed[call.saved] == NONE).any() else kept)
    return draft.build()


def _calls(step: Step, modules: list[int] | tuple[int, ...]) -> list[_Call]:
    calls, storages = step.module_calls, step.storages
    backward = np.flatnonzero(step.ops.phase == "backward")
    rows = np.flatnonzero(np.isin(calls.module_id, modules) & ~calls.is_recompute & (calls.first_op_id != NONE))
    created, freed, sizes = storages.created_op_id, storages.freed_op_id, storages.allocated_bytes
    phases = np.where(freed != NONE, step.ops.phase[np.maximum(freed, 0)], "")
    in_backward, in_forward = phases == "backward", phases == "forward"
    ends = np.where(freed == NONE, len(step.ops), freed)
    if _is_cut_off(step):
        in_backward = in_backward | ((freed == NONE) & (storages.category == "activation"))
    found = []
    for row in rows[np.argsort(calls.first_op_id[rows], kind="stable")].tolist():
        first, last = int(calls.first_op_id[row]), int(calls.last_op_id[row])
        if not _is_cut_off(step) and (not len(backward) or backward[-1] < last):
            continue
        made = np.flatnonzero((created >= first) & (created <= last))
        output = _output(step, made[ends[made] > last])
        saved = made[(ends[made] > last) & in_backward[made] & (made != output)]
        is_input = (created < first) & (freed >= first) & in_forward & (output != NONE) & (sizes == sizes[output])
        found.append(_Call(first, last, made, saved, np.flatnonzero(is_input)))
    return found


def _is_cut_off(step: Step) -> bool:
    """Returns whether a step ends in forward or backward, as where memory runs out."""
    phases = step.ops.phase[np.isin(step.ops.phase, ("forward", "backward", "optimizer"))]
    return bool(len(phases)) and phases[-1] != "optimizer"


def _output(step: Step, left: Ints) -> int:
    """Returns the storage that a layer returns, which the next one gets as its input; NONE where nothing is left.

    It is the largest that the last operator made: a norm makes its statistics behind its output.
    """
    if not len(left):
        return NONE
    rows = step.storages.created_op_id[left]
    names, stacks = step.ops.name[rows], step.ops.stack_id[rows]
    others = np.flatnonzero((names != names[-1]) | (stacks != stacks[-1]))
    own = left[others[-1] + 1 :] if len(others) else left[-1:]
    return int(own[np.argmax(step.storages.allocated_bytes[own])])


def _made_again(step: Step, call: _Call) -> int:
    """Returns the operator before which a call is repeated: the first of backward behind all that came after the call.

    What backward frees last before it frees something of the call itself belongs to the layer behind it.
    """
    storages, ops = step.storages, step.ops
    freed = storages.freed_op_id[call.saved]
    first_freed = int(freed[freed != NONE].min())
    later = (storages.created_op_id > call.last) & (storages.freed_op_id < first_freed)
    later &= (storages.freed_op_id != NONE) & (ops.phase[np.maximum(storages.freed_op_id, 0)] == "backward")
    later &= ops.phase[np.maximum(storages.created_op_id, 0)] != "backward"
    return int(storages.freed_op_id[later].max()) + 1 if later.any() else first_freed
