"""Marks operators by what surrounds them, and those whose result depends on how often the step runs."""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

import numpy as np

from memprof.errors import PolicyError
from memprof.trace.operator_facts import BATCH_NORM_WORDS, EMPTY_STRIDED, have_word
from memprof.trace.schema import NONE, Bools, Ints, Stacks
from memprof.trace.source_lines import PLACE, is_of_torch
from memprof.trace.step import Step
from memprof.trace.usages import COMPILES_MODELS

#: Which stacks match each pattern: every plan of a search asks for the same.
_FOUND: WeakKeyDictionary[Stacks, dict[re.Pattern[str], Bools]] = WeakKeyDictionary()
_INSTANCE = re.compile(r"torch/nn/functional\.py:[0-9]+:instance_norm\b")


def ran_within(step: Step, pattern: re.Pattern[str]) -> Bools:
    """Marks the operators whose stacks match a pattern, shape ``(ops,)``; none without stacks."""
    found = _FOUND.setdefault(step.stacks, {})
    if pattern not in found:
        matches = [bool(pattern.search(str(frames))) for frames in step.stacks.frames]
        found[pattern] = np.array([*matches, False], dtype=np.bool_)  # NONE indexes the last entry
    marked: Bools = found[pattern][step.ops.stack_id]
    return marked


# Finds what ran inside a transform of torch.func, where policies leave a job as it is.
#
# torch calls no hooks of saved tensors there, and what a transform passes around are wrappers without memory of their
# own. ``own_types.is_in_transform`` says the same while a job runs.

#: Error where everything that a policy would change runs inside a transform.
IN_TRANSFORM = (
    "{what} inside a transform of torch.func (grad, vmap), where torch calls no hooks of saved tensors and {policy} "
    "changes nothing; leave it out of the plan."
)

#: In the stack of every operator inside a transform. torch._functorch also holds torch.compile's back end, which is not
#: one, and functional_call, which transforms nothing.
_TRANSFORM = re.compile(r"[/\\]torch[/\\](?:_functorch[/\\](?:apis|eager_transforms|vmap)|_vmap_internals)\.py:")


def is_in_transform(step: Step) -> Bools:
    """Marks the operators that ran inside a transform of torch.func, shape ``(ops,)``; none without stacks."""
    return ran_within(step, _TRANSFORM)


# Finds what ran in code that torch.compile generated, where only part of what a policy changes can be predicted.
#
# Such code fuses operators, saves tensors for backward when all of them have run, and reuses memory in between. A
# recording shows its buffers and kernels, but not where they are allocated in C++. ``runtime.job_traits`` finds
# which modules of a running job are compiled.

#: Error where a policy would change which tensors generated code saves.
SAVES_ITSELF = (
    "{what} runs code that torch.compile generates, which decides by itself what is saved for backward, so {policy} "
    "has no predictable effect there: leave it out, choose modules that are not compiled, or give the compiler a "
    "budget with memprof suggest --compile."
)

#: In the stack of every operator that inductor's code calls.
_INDUCTOR = re.compile(r"[/\\]torch[/\\]_inductor[/\\]output_code\.py:")
#: In that of every operator that AOTAutograd's graph runs, also with backends that generate no code.
_GRAPH = re.compile(r"[/\\]torch[/\\]_functorch[/\\]_aot_autograd[/\\]\w+\.py:")
#: Name of what a compiled model allocates outside of its operators, as where generated code allocates in C++.
_UNKNOWN = "compiled region"
#: Operators of generated code itself: its kernels, and its allocations. A recording on a GPU shows the latter alone.
_SHOWN = ("inductor.", EMPTY_STRIDED)


def is_in_compiled_code(step: Step) -> Bools:
    """Marks the operators that ran in compiled graphs, and what these allocated outside any, shape ``(ops,)``.

    All that a graph saves for backward it saves when it ends, whatever its backend.
    """
    marked: Bools = ran_within(step, _INDUCTOR) | ran_within(step, _GRAPH) | (step.ops.name == _UNKNOWN)
    return marked


def may_be_compiled(step: Step) -> Bools:
    """Marks the operators that run in generated code here, or in a real run of the job, shape ``(ops,)``.

    A dry run compiles nothing on a virtual GPU, or where it does not support the compiler. Which of its operators a
    real run compiles is not recorded.
    """
    if COMPILES_MODELS in step.usages:
        return np.ones(len(step.ops), dtype=np.bool_)
    return is_in_compiled_code(step)


def require_kernels(step: Step) -> None:
    """Rejects a step with generated code whose kernels are unknown, and with them the sizes of what they compute.

    Raises:
        PolicyError: The recording does not show them: that of a real run with code in C++, or on a GPU.
    """
    is_inside = ran_within(step, _INDUCTOR) | (step.ops.name == _UNKNOWN)
    shown = _SHOWN[:1] if step.is_on_device() else _SHOWN
    if is_inside.any() and not any(str(name).startswith(shown) for name in set(step.ops.name[is_inside])):
        raise PolicyError(
            "the recording shows only part of what code that torch.compile generated computes, so what grows with the "
            "batch is unknown: dry-run the job with memprof record --dry-run, and use that recording."
        )


def describe_hooks(step: Step, hooked: Ints, policy: str) -> str:
    """Returns why a policy would have no effect where hooks of the job take saved tensors, a sentence.

    Args:
        step: The step.
        hooked: Operators whose saved tensors they take; the first is named.
        policy: What would have no effect.
    """
    first, calls = int(hooked[0]), step.module_calls
    inside = calls.enters_hooks & (calls.first_op_id <= first) & (first <= calls.last_op_id)
    module = [step.ops.module_id[first], *calls.module_id[inside & (step.modules.name[calls.module_id] != "")]][-1]
    name = str(step.modules.name[module]) if module != NONE else ""
    frames = str(step.stacks.frames[step.ops.stack_id[first]]) if step.ops.stack_id[first] != NONE else ""
    own = next((place for line in frames.splitlines() if not is_of_torch(line) and (place := PLACE.match(line))), None)
    where = "" if own is None else f" ({own['path'].replace(chr(92), '/').rpartition('/')[2]}:{own['line']})"
    return (
        f"{name or 'the model'}{where} runs under saved_tensors_hooks of the job, such as save_on_cpu, or with all "
        f"hooks disabled: {policy} has no effect there. Leave the hooks out, or choose modules that run without them."
    )


class Calls:
    """Calls of modules around each operator of a step, some of which are chosen.

    These are the calls of forward, and those that ``checkpoint(use_reentrant=True)`` repeats: in its first run autograd
    saves nothing, in its second what it saves in any forward. The second run of the other variant fills the places of
    tensors that the first has saved, and is not among them.

    Attributes:
        inner: The innermost call. Shape (ops,).
        region_of: The outermost call of a chosen module, NONE outside.
        top_start: First operator of the outermost call of all, 0 outside.
        wrapped_end: Last operator of the outermost call of a chosen module or of a root.
    """

    def __init__(self, step: Step, is_chosen: Bools) -> None:
        """Finds the calls.

        Args:
            step: The step.
            is_chosen: Chosen modules, shape ``(modules,)``.
        """
        calls, total = step.module_calls, len(step.ops)
        self.first, self.last, self.parent = calls.first_op_id, calls.last_op_id, calls.parent_call_id
        self.module, self.is_recompute = calls.module_id, calls.is_recompute
        self.inner = np.full(total, NONE, dtype=np.int64)
        self.region_of = np.full(total, NONE, dtype=np.int64)
        self.top_start = np.zeros(total, dtype=np.int64)
        self.wrapped_end = np.arange(total)
        is_region = is_chosen[calls.module_id]
        is_wrapped = is_region | (step.modules.parent_id[calls.module_id] == NONE)
        is_complete = (self.first != NONE) & (self.last != NONE)
        is_complete &= ~calls.is_recompute | _has_nodes(step, self.first, self.last)
        depth = np.zeros(len(calls), dtype=np.int64)
        parents = self.parent
        while (parents != NONE).any():
            depth += parents != NONE
            parents = np.where(parents != NONE, self.parent[parents], NONE)
        has_wrapped = np.zeros(total, dtype=np.bool_)
        for level in range(int(depth.max(initial=-1)) + 1):
            rows = np.flatnonzero((depth == level) & is_complete)
            length = self.last[rows] - self.first[rows] + 1
            owner = np.repeat(rows, length)
            ops = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length) + self.first[owner]
            self.inner[ops] = owner
            if level == 0:
                self.top_start[ops] = self.first[owner]
            is_new = is_region[owner] & (self.region_of[ops] == NONE)
            self.region_of[ops[is_new]] = owner[is_new]
            is_new = is_wrapped[owner] & ~has_wrapped[ops]
            self.wrapped_end[ops[is_new]] = self.last[owner[is_new]]
            has_wrapped[ops[is_new]] = True

    def surround(self, first: Ints, last: Ints, again: Ints) -> Bools:
        """Returns whether calls of chosen modules surround regions: those that are repeated with one lie inside it."""
        region = self.region_of[first]
        is_around: Bools = (region != NONE) & (self.last[region] >= last)
        rows = np.flatnonzero(is_around)
        module = self.module[region[rows]]
        is_inside = np.zeros(len(rows), dtype=np.bool_)
        for call in np.flatnonzero(self.is_recompute & np.isin(self.module, module)).tolist():
            is_again = (self.first[call] <= again[rows]) & (again[rows] <= self.last[call])
            is_inside |= is_again & (module == self.module[call])
        is_around[rows[is_inside]] = False
        return is_around


def _has_nodes(step: Step, first: Ints, last: Ints) -> Bools:
    """Marks the ranges of operators, each of shape ``(ranges,)``, that hold a recomputed one with a backward node."""
    ops = step.ops
    made = ops.forward_op_id[(ops.forward_op_id != NONE) & ~ops.is_recompute]
    has_node = np.zeros(len(ops) + 1, dtype=np.int64)
    has_node[made[ops.is_recompute[made]] + 1] = 1
    count = np.cumsum(has_node)
    found: Bools = count[last + 1] > count[first]
    return found


def batch_norms(step: Step) -> list[str]:
    """Returns the modules that normalise by statistics of their batch: not those in eval mode, nor InstanceNorm.

    In training the operator writes the statistics beside its result, in eval mode empty tensors.
    """
    ops, uses, storages = step.ops, step.uses, step.storages
    is_norm = have_word(ops.name, BATCH_NORM_WORDS)
    is_norm &= (ops.phase == "forward") & ~ops.is_recompute & ~ran_within(step, _INSTANCE)
    if not is_norm.any():
        return []
    rows = (uses.role == "write") & is_norm[uses.op_id] & (storages.requested_bytes[uses.storage_id] > 0)
    written = np.bincount(uses.op_id[rows], minlength=len(ops))
    modules = ops.module_id[is_norm & (written > 1)].tolist()
    return list(dict.fromkeys(str(step.modules.name[each]) if each != NONE else "" for each in modules))


def changed_buffers(step: Step) -> tuple[Ints, Ints]:
    """Returns the operators of forward that change a buffer in place, and the storages of the buffers, in order."""
    uses, storages = step.uses, step.storages
    is_change = (uses.role == "mutate") & (storages.category[uses.storage_id] == "buffer")
    is_change &= step.ops.phase[uses.op_id] == "forward"
    return uses.op_id[is_change], uses.storage_id[is_change]


def draws(step: Step) -> bool:
    """Returns whether forward draws random numbers, as dropout does."""
    return bool(np.any(step.ops.uses_rng & (step.ops.phase == "forward") & ~step.ops.is_recompute))
