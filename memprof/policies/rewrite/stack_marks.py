"""Marks operators by what their Python stacks pass through."""

from __future__ import annotations

import re
from weakref import WeakKeyDictionary

import numpy as np

from memprof.trace.schema import NONE, Bools, Ints, Stacks
from memprof.trace.source_lines import PLACE, is_of_torch
from memprof.trace.step import Step

#: Which stacks match each pattern: every plan of a search asks for the same.
_FOUND: WeakKeyDictionary[Stacks, dict[re.Pattern[str], Bools]] = WeakKeyDictionary()


def ran_within(step: Step, pattern: re.Pattern[str]) -> Bools:
    """Marks the operators whose stacks match a pattern, shape ``(ops,)``; none without stacks."""
    found = _FOUND.setdefault(step.stacks, {})
    if pattern not in found:
        matches = [bool(pattern.search(str(frames))) for frames in step.stacks.frames]
        found[pattern] = np.array([*matches, False], dtype=np.bool_)  # NONE indexes the last entry
    marked: Bools = found[pattern][step.ops.stack_id]
    return marked


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
        f"{name or 'The model'}{where} runs under saved_tensors_hooks of the job, such as save_on_cpu, or with all "
        f"hooks disabled: {policy} has no effect there. Leave the hooks out, or choose modules that run without them."
    )
