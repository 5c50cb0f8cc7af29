"""Finds what autograd keeps for backward while chosen modules run: when each storage is packed, unpacked and released.

Read from a recorded step, for every policy that replaces saved tensors: swap and compress.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.rewrite.autocast_cache import cached_until
from memprof.policies.rewrite.held_by_python import result_ends, variable_ends
from memprof.policies.rewrite.insertion import COMPRESS, SWAP_IN, SWAP_OUT
from memprof.policies.rewrite.stack_marks import (
    IN_TRANSFORM,
    SAVES_ITSELF,
    Calls,
    describe_hooks,
    is_in_transform,
    may_be_compiled,
)
from memprof.policies.runtime.model_names import chosen_modules, with_children
from memprof.policies.swap.reruns import find_reruns
from memprof.trace.files.coded import coded_column
from memprof.trace.schema import NONE, Bools, Ints
from memprof.trace.step import Step

#: Categories that are never moved: they have lifetimes of their own, and their owners hold them anyway.
_OWNED = ("parameter", "buffer", "gradient", "optimizer_state", "input")
#: Operators that these policies insert into forward.
_INSERTED = (SWAP_OUT, SWAP_IN, COMPRESS)
#: Error if two of them choose the same modules.
OVERLAP = "two policies (swap, compress) would move tensors saved by the same modules; choose separate modules."
#: Error if a module cannot be chosen.
NEVER_CALLED = "{name} is never called, so it saves nothing; choose its submodules: '{holds}'."
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_COLUMNS = ("storage", "forward_op", "packed", "flushed", "unpacked", "released", "held")


@dataclass(frozen=True, eq=False)
class Records:
    """The storages packed, in order of packing; each column of shape ``(records,)``.

    A moment is the operator before which something happens: ``moment == 5`` is between operators 4 and 5.

    Attributes:
        storage: The storage.
        forward_op: The forward operator that packed it first.
        packed: Moment at which it is packed.
        flushed: Moment at which the outermost wrapped call around it has returned.
        unpacked: Moment at which backward needs it first.
        released: Last operator of the last backward node that holds it.
        held: Last operator up to which anything but those nodes holds the original.
        hooked: Number of tensors that the hooks see, including those they do not take.
        again: What is saved after its storage was unpacked, by a backward with create_graph, in forward: what was
            copied back is another storage, with a record of its own; None where there is none.
    """

    storage: Ints
    forward_op: Ints
    packed: Ints
    flushed: Ints
    unpacked: Ints
    released: Ints
    held: Ints
    hooked: int = 0
    again: Records | None = None

    def __len__(self) -> int:
        return len(self.storage)

    def take(self, rows: Bools | Ints) -> Records:
        """Returns some of the records, or all in a different order."""
        return dataclasses.replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})

    def merged(self, others: Records) -> tuple[Records, Bools]:
        """Returns the records with others in order of packing, and which of them are not the others."""
        columns: dict[str, Any] = {name: np.append(getattr(self, name), getattr(others, name)) for name in _COLUMNS}
        order = np.argsort(columns["packed"], kind="stable")
        is_own = order < len(self)
        return dataclasses.replace(
            self, again=None, **{name: values[order] for name, values in columns.items()}
        ), is_own


def find_records(
    step: Step,
    patterns: Sequence[str],
    minimum_bytes: int,
    dtypes: Sequence[str] = _DTYPES,
    *,
    with_variables: bool = False,
) -> Records:
    """Finds the storages packed while modules matching the patterns run forward.

    Args:
        step: The step.
        patterns: Patterns of the modules' names.
        minimum_bytes: Smaller storages stay.
        dtypes: Element types that are packed.
        with_variables: Assume that variables and results of a forward hold what they can, which is not recorded.

    Raises:
        PolicyError: A pattern matches no module, or none that is called, or those run in transforms of torch.func only,
            or call code that torch.compile generated.
    """
    is_chosen = called_modules(step, patterns)
    require_untouched(step, is_chosen)
    ops, storages, saved = step.ops, step.storages, step.saved
    calls = Calls(step, is_chosen)
    compiled = np.flatnonzero(may_be_compiled(step) & (calls.region_of != NONE))
    if len(compiled):
        name = str(step.modules.name[calls.module[calls.region_of[compiled[0]]]])
        raise PolicyError(SAVES_ITSELF.format(what=name or "the model", policy="replacing saved tensors"))

    is_node = (ops.forward_op_id != NONE) & ~ops.is_recompute & (ops.phase == "backward")
    first, last = node_bounds(ops.forward_op_id, is_node)
    forward, storage = saved.forward_op_id, saved.storage_id
    created = storages.created_op_id[storage]
    is_packed = (calls.region_of[forward] != NONE) & (first[forward] != NONE)
    in_transform = is_in_transform(step)
    reruns = find_reruns(step)
    is_repeated = reruns.cover(len(ops))
    if is_packed.any() and in_transform[forward[is_packed]].all():
        raise PolicyError(IN_TRANSFORM.format(what="the chosen modules run", policy="replacing saved tensors"))
    # Hooks of a region that is run again take all that is saved inside.
    is_packed &= ~(in_transform | is_repeated)[forward]
    # So do the job's own.
    goes_in = calls.surround(reruns.first, reruns.last, reruns.again) & ~in_transform[reruns.first]
    taken = np.append(forward[is_packed & ops.is_hooked[forward]], reruns.first[goes_in & ops.is_hooked[reruns.first]])
    is_packed &= ~ops.is_hooked[forward]
    goes_in &= ~ops.is_hooked[reruns.first]
    if len(taken) and not (is_packed.any() or goes_in.any()):
        raise PolicyError(describe_hooks(step, np.sort(taken), "replacing saved tensors"))
    hooked = int(is_packed.sum())
    # Storages that existed before the outermost call belong to the caller, and stay.
    is_packed &= created >= calls.top_start[forward]
    is_packed &= ~np.isin(storages.category[storage], _OWNED) & np.isin(storages.dtype[storage], dtypes)
    is_packed &= storages.requested_bytes[storage] >= minimum_bytes
    goes_in &= storages.created_op_id[reruns.storage] >= calls.top_start[reruns.first]
    goes_in &= ~np.isin(storages.category[reruns.storage], _OWNED) & np.isin(storages.dtype[reruns.storage], dtypes)
    goes_in &= storages.requested_bytes[reruns.storage] >= minimum_bytes
    if not (is_packed.any() or goes_in.any()):
        nothing = np.empty(0, dtype=np.int64)
        return Records(nothing, nothing, nothing, nothing, nothing, nothing, nothing, hooked)

    # What reads an input again, or saves it, has what was unpacked in its place.
    inputs = reruns.storage[goes_in]
    by_rerun = reruns.is_use & np.isin(step.uses.storage_id, inputs)
    is_saved_again = (ops.is_recompute | is_repeated)[forward] & np.isin(storage, inputs)
    held = np.maximum(_held_otherwise(step, calls, is_packed, is_saved_again, by_rerun, last), storages.held_op_id)
    if with_variables:
        moved = np.unique(np.append(storage[is_packed], inputs))
        held = np.maximum(held, _held_by_variables(step, calls, moved))
        held = np.maximum(held, result_ends(step, calls.inner))
    lives = np.where(storages.freed_op_id == NONE, len(ops), storages.freed_op_id)
    # A checkpoint detaches what it unpacks before the region runs again.
    used_again = np.full(len(storages), len(ops), dtype=np.int64)
    np.minimum.at(used_again, step.uses.storage_id[by_rerun], step.uses.op_id[by_rerun])
    first = np.append(first[forward[is_packed]], np.minimum(reruns.again[goes_in], used_again[inputs]))
    last = np.append(last[forward[is_packed]], lives[inputs])
    storage, forward = np.append(storage[is_packed], inputs), np.append(forward[is_packed], reruns.first[goes_in])
    # Autograd saves an operator's inputs before it runs and its outputs after it.
    written = step.uses.role != "read"
    made = np.unique(_pair(step.uses.op_id[written], step.uses.storage_id[written], step))
    is_output = np.isin(_pair(forward, storage, step), made)
    is_output |= step.storages.created_op_id[storage] == forward
    is_output[len(storage) - len(inputs) :] = False
    packed = forward + is_output
    order = np.lexsort((storage, ~is_output, packed))
    kept, first_row = np.unique(storage[order], return_index=True)
    first_row = order[first_row]
    unpacked = np.full(len(storages), len(ops), dtype=np.int64)
    released = np.full(len(storages), NONE, dtype=np.int64)
    np.minimum.at(unpacked, storage, first)
    np.maximum.at(released, storage, last)
    freed = lives[kept]
    later = order[forward[order] >= unpacked[storage[order]]]
    needed = np.full(len(storages), len(ops), dtype=np.int64)
    np.minimum.at(needed, storage[later], first[later])
    of, rows = np.unique(storage[later], return_index=True)
    rows = later[rows]
    again = Records(of, forward[rows], packed[rows], packed[rows], needed[of], released[of], lives[of])
    # No storage lives longer than it did when the nodes held it too.
    records = Records(
        storage=kept,
        forward_op=forward[first_row],
        packed=packed[first_row],
        flushed=calls.wrapped_end[forward[first_row]] + 1,
        unpacked=unpacked[kept],
        released=np.minimum(released[kept], freed),
        held=np.minimum(held[kept], freed),
        hooked=hooked,
        again=again if len(again) else None,
    )
    return records.take(np.lexsort((kept, ~is_output[first_row], records.packed)))


def called_modules(step: Step, patterns: Sequence[str]) -> Bools:
    """Marks the chosen modules that are called in a step, shape ``(modules,)``.

    Raises:
        PolicyError: A pattern matches no module, or no matching module is called.
    """
    is_chosen = chosen_modules(step, patterns)
    is_called = np.zeros(len(is_chosen), dtype=np.bool_)
    is_called[step.module_calls.module_id] = True
    if not (is_chosen & is_called).any():
        name = str(step.modules.name[np.flatnonzero(is_chosen)[0]])
        raise PolicyError(NEVER_CALLED.format(name=name, holds=f"{name}.*".removeprefix(".")))
    return is_chosen & is_called


def require_untouched(step: Step, is_chosen: Bools) -> None:
    """Checks that no other policy handles what the chosen modules save: only one pair of hooks takes effect.

    Raises:
        PolicyError: One does.
    """
    is_inside = with_children(step, is_chosen)
    ours = np.flatnonzero(np.isin(step.ops.name, _INSERTED) & (step.ops.phase == "forward"))
    modules = step.ops.module_id[ours]
    if (is_inside[modules] & (modules != NONE)).any():
        raise PolicyError(OVERLAP)


def _held_otherwise(
    step: Step, calls: Calls, is_packed: Bools, is_saved_again: Bools, by_rerun: Bools, node_last: Ints
) -> Ints:
    """Returns the last operator up to which anything but the nodes that packed it holds each storage."""
    ops, uses, saved, storages = step.ops, step.uses, step.saved, step.storages
    held = storages.created_op_id.copy()
    # Other readers, in forward or from a node that saved the storage itself.
    packed_pairs = _pair(saved.forward_op_id[is_packed], saved.storage_id[is_packed], step)
    node = ops.forward_op_id[uses.op_id]
    by_packer = by_rerun | ((node != NONE) & np.isin(_pair(node, uses.storage_id, step), packed_pairs))
    np.maximum.at(held, uses.storage_id[~by_packer], uses.op_id[~by_packer])
    others = ~(is_packed | is_saved_again) & (node_last[saved.forward_op_id] != NONE)
    np.maximum.at(held, saved.storage_id[others], node_last[saved.forward_op_id[others]])
    held = np.maximum(held, cached_until(step, np.isin(np.arange(len(storages)), saved.storage_id)))
    # Storages that outlive backward after their nodes released them are held throughout: an output, a cache.
    freed = np.where(storages.freed_op_id == NONE, len(ops), storages.freed_op_id)
    is_retained = np.isin(np.arange(len(storages)), saved.storage_id[saved.released_op_id == NONE])
    outlives = (freed > node_last.max(initial=NONE)) & (storages.created_op_id != NONE) & ~is_retained
    held[outlives] = freed[outlives]
    # A call's frames hold its arguments until it returns: storages that existed before and are used inside.
    of_use = uses.storage_id
    created = storages.created_op_id[of_use]
    call = np.where(by_rerun, NONE, calls.inner[uses.op_id])
    while (call != NONE).any():
        was_passed = (call != NONE) & (created < calls.first[call])
        np.maximum.at(held, of_use[was_passed], calls.last[call[was_passed]])
        call = np.where(call != NONE, calls.parent[call], NONE)
    return held


def _held_by_variables(step: Step, calls: Calls, moved: Ints) -> Ints:
    """Returns until when a variable of a module's forward may hold each storage; NONE if none does.

    This is the forward of the innermost call in which the storage is created and last used. The first moved storage of
    a shape is held until the call returns: a forward often continues under a different name than it began with
    (``x = self.embed(ids); output = self.encoder(x)``), and then keeps one (``for layer in layers: x = layer(x)``).
    """
    storages, uses = step.storages, step.uses
    last = np.full(len(storages), NONE, dtype=np.int64)
    in_forward = step.ops.phase[uses.op_id] == "forward"
    np.maximum.at(last, uses.storage_id[in_forward], uses.op_id[in_forward])
    call = np.where(last != NONE, calls.inner[last], NONE)
    while (is_outside := (call != NONE) & (calls.first[call] > storages.created_op_id)).any():
        call = np.where(is_outside, calls.parent[call], call)
    ends = variable_ends(step, np.arange(len(storages)), call, last)
    rows = moved[ends[moved] != NONE]
    rows = rows[np.argsort(storages.created_op_id[rows], kind="stable")]
    frames = np.stack([call[rows], coded_column(storages, "shape").codes[rows]], axis=1)
    first = rows[np.unique(frames, axis=0, return_index=True)[1]]
    ends[first] = calls.last[call[first]]
    return ends


def node_bounds(forward_op: Ints, is_node: Bools) -> tuple[Ints, Ints]:
    """Returns the first and the last operator of each forward operator's backward node, NONE where there is none."""
    total = len(forward_op)
    rows = np.flatnonzero(is_node)
    first, last = np.full(total, NONE, dtype=np.int64), np.full(total, NONE, dtype=np.int64)
    first[forward_op[rows[::-1]]] = rows[::-1]
    last[forward_op[rows]] = rows
    return first, last


def _pair(op_ids: Ints, storage_ids: Ints, step: Step) -> Ints:
    """Combines an operator and a storage into one number."""
    return op_ids * len(step.storages) + storage_ids
