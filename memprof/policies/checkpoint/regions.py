"""The recomputed parts of a recorded step: every call of a chosen module, or every segment of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.errors import PolicyError
from memprof.policies.checkpoint.policy import Checkpoint, longest_sequence, split
from memprof.policies.rewrite.stack_marks import (
    IN_TRANSFORM,
    SAVES_ITSELF,
    describe_hooks,
    is_in_compiled_code,
    is_in_transform,
)
from memprof.policies.runtime.model_names import chosen_modules, module_names
from memprof.trace.schema import NONE, Ints
from memprof.trace.step import Step


@dataclass(frozen=True, eq=False)
class Regions:
    """Regions in order of entry, so that each comes after its parent; columns of shape ``(regions,)``.

    Attributes:
        first: First operator.
        last: Last operator.
        parent: The region around it, NONE where there is none.
        module_id: The module whose call it is.
        innermost: The innermost region of each operator, NONE outside, shape ``(ops,)``.
    """

    first: Ints
    last: Ints
    parent: Ints
    module_id: Ints
    innermost: Ints

    def __len__(self) -> int:
        return len(self.first)

    def made_in(self, region: Ints, created_op_id: Ints) -> Ints:
        """Returns the innermost region, from ``region`` outwards, that allocates a storage; NONE if there is none.

        Args:
            region: Where to start, NONE allowed; one for each storage.
            created_op_id: The operators that make the storages.
        """
        found = region.copy()
        while True:
            outside = (found != NONE) & ((created_op_id < self.first[found]) | (created_op_id > self.last[found]))
            if not outside.any():
                return found
            found[outside] = self.parent[found[outside]]


def find_regions(step: Step, policy: Checkpoint) -> Regions:
    """Finds the regions that a policy recomputes in a recorded step.

    Raises:
        PolicyError: No module matches, no matching module is called, one runs in code that torch.compile generated, or
            the sequence cannot be divided.
    """
    spans = _without_hooks(step, _segments(step, policy) if policy.segments else _calls(step, policy))
    is_inside = is_in_compiled_code(step)
    for begin, end, module in spans:
        if is_inside[begin : end + 1].any():
            name = module_names(step)[module]
            raise PolicyError(SAVES_ITSELF.format(what=name or "the model", policy="checkpoint"))
    first, last, module_id = (np.array(column, dtype=np.int64) for column in zip(*spans, strict=True))
    parent = np.full(len(first), NONE, dtype=np.int64)
    innermost = np.full(len(step.ops), NONE, dtype=np.int64)
    for region in range(len(first)):
        parent[region] = innermost[first[region]]
        innermost[first[region] : last[region] + 1] = region
    return Regions(first, last, parent, module_id, innermost)


def _without_hooks(step: Step, spans: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Returns the spans without those in which the job's own hooks take all that is saved: a region changes nothing.

    Hooks around the whole region are outside of its own, and take only what it is called with.

    Raises:
        PolicyError: They take all of each, or a part of one, which would run again and keep that part.
    """
    calls, ops = step.module_calls, step.ops
    entering = np.flatnonzero(calls.enters_hooks & ~calls.is_recompute & (calls.first_op_id != NONE))
    if not len(entering):
        return spans
    is_node = np.zeros(len(ops), dtype=np.bool_)
    is_node[ops.forward_op_id[ops.forward_op_id != NONE]] = True
    hooked = np.flatnonzero(ops.is_hooked & is_node)
    free = step.saved.forward_op_id[~ops.is_hooked[step.saved.forward_op_id]]
    effective: list[tuple[int, int, int]] = []
    without: list[Ints] = []
    for first, last, module in spans:
        enters = np.any((calls.first_op_id[entering] >= first) & (calls.last_op_id[entering] <= last))
        inside = hooked[(hooked >= first) & (hooked <= last)]
        if not enters or not len(inside):
            effective.append((first, last, module))
        elif np.any((free >= first) & (free <= last)):
            raise PolicyError(describe_hooks(step, inside, "checkpoint"))
        else:
            without.append(inside)
    if without and not effective:
        raise PolicyError(describe_hooks(step, without[0], "checkpoint"))
    return effective


def _forward_calls(step: Step) -> Ints:
    """Returns the calls that backward runs through, except those that repeat one.

    With them come the other calls of their modules in training, such as one whose output the loss does not use.
    ``apply`` skips calls without gradients, such as a frozen teacher's or an evaluation between two steps, and those
    in transforms of torch.func.

    Raises:
        PolicyError: All of them are in such transforms.
    """
    calls, ops = step.module_calls, step.ops
    ran = np.flatnonzero(~calls.is_recompute & (calls.first_op_id != NONE) & (calls.last_op_id != NONE))
    has_node = np.zeros(len(ops), dtype=np.bool_)
    has_node[ops.forward_op_id[ops.forward_op_id != NONE]] = True
    nodes_before = np.append(0, np.cumsum(has_node))
    first, end = calls.first_op_id[ran], calls.last_op_id[ran] + 1
    is_trained = nodes_before[end] > nodes_before[first]
    is_trained |= np.isin(calls.module_id[ran], calls.module_id[ran[is_trained]]) & (ops.phase[first] == "forward")
    others_before = np.append(0, np.cumsum(~is_in_transform(step)))
    is_region = is_trained & (others_before[end] > others_before[first])
    if is_trained.any() and not is_region.any():
        raise PolicyError(IN_TRANSFORM.format(what="the model runs", policy="checkpoint"))
    return ran[is_region]


def _calls(step: Step, policy: Checkpoint) -> list[tuple[int, int, int]]:
    names, chosen, calls = module_names(step), chosen_modules(step, policy.modules), step.module_calls
    is_leaf = ~np.isin(step.modules.module_id, step.modules.parent_id)
    changing_ops, made = _changes(step)
    spans: list[tuple[int, int, int]] = []
    left_alone = ""
    end_of_kept = NONE
    for call in _forward_calls(step):
        module = int(calls.module_id[call])
        span = (int(calls.first_op_id[call]), int(calls.last_op_id[call]), module)
        if not chosen[module]:
            continue
        changing = slice(*np.searchsorted(changing_ops, (span[0], span[1] + 1)))
        if is_leaf[module] and np.any(made[changing] < span[0]):
            left_alone = names[module]
        elif not policy.keep or span[0] > end_of_kept:
            # With kept operators only the outermost are regions: an inner one would recompute what the outer one keeps.
            spans.append(span)
            end_of_kept = span[1]
    if left_alone and not spans:
        raise PolicyError(f"{left_alone} changes its input in place and cannot run again; choose the module around it.")
    if not spans:
        name = names[int(np.argmax(chosen))] or "the model"
        raise PolicyError(f"backward runs through no call of {name}; choose its submodules, such as '{name}.*'.")
    return spans


def _changes(step: Step) -> tuple[Ints, Ints]:
    """Finds the operators that change a storage in place, and when it was allocated; excludes states of the model."""
    uses = step.uses
    rows = np.flatnonzero(uses.role == "mutate")
    is_state = np.isin(step.storages.category, ("buffer", "parameter"))
    rows = rows[~is_state[uses.storage_id[rows]]]
    return uses.op_id[rows], step.storages.created_op_id[uses.storage_id[rows]]


def _segments(step: Step, policy: Checkpoint) -> list[tuple[int, int, int]]:
    names, calls = module_names(step), step.module_calls
    children = np.bincount(step.modules.parent_id[step.modules.parent_id != NONE], minlength=len(names))
    if policy.modules:
        matching = np.flatnonzero(chosen_modules(step, policy.modules))
        if len(matching) > 1:
            raise PolicyError(f"segments requires a single nn.Sequential; {len(matching)} modules match.")
        module = int(matching[0])
    else:
        is_sequence = step.modules.type == "Sequential"
        name = longest_sequence([(names[row], int(children[row])) for row in np.flatnonzero(is_sequence)])
        module = names.index(name)
    name = names[module] or "the model"
    if children[module] < policy.segments:
        raise PolicyError(f"{name} has {children[module]} modules, fewer than {policy.segments} segments.")
    spans: list[tuple[int, int, int]] = []
    trained = _forward_calls(step)
    for call in trained[calls.module_id[trained] == module]:
        inner = np.flatnonzero(calls.parent_call_id == call)
        # A sequence runs only its modules; of a module's class, only the name is recorded.
        span = slice(calls.first_op_id[call], calls.last_op_id[call] + 1)
        if len(inner) != children[module] or np.any(step.ops.module_id[span] == module):
            raise PolicyError(f"segments requires modules that run one after the other; those of {name} do not.")
        for begin, end in split(len(inner), policy.segments):
            ran = [int(one) for one in inner[begin:end] if calls.first_op_id[one] != NONE]
            if ran:
                spans.append((int(calls.first_op_id[ran[0]]), int(calls.last_op_id[ran[-1]]), module))
    if not spans:
        raise PolicyError(f"backward runs through no call of {name}.")
    return spans
