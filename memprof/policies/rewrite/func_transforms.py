"""Finds what ran inside a transform of torch.func, where policies leave a job as it is.

torch calls no hooks of saved tensors there, and what a transform passes around are wrappers without memory of their
own. ``own_types.is_in_transform`` says the same while a job runs.
"""

from __future__ import annotations

import re

from memprof.policies.rewrite.stack_marks import ran_within
from memprof.trace.schema import Bools
from memprof.trace.step import Step

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
