"""Why the optimizer policy is refused: the sentences that a prediction and a run share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memprof.errors import PolicyError
from memprof.trace.usages import CHANGES_SETTINGS, NEEDS_CLOSURE, OptimizerTraits

if TYPE_CHECKING:
    from memprof.policies.optimizer.policy import OptimizerPolicy
    from memprof.trace.step import Step

IN_HOST_MEMORY = "the parameters and the optimizer state are already in host memory; host changes nothing."
USED = (
    "a gradient is read or changed after backward: step-in-backward has already used and freed it. Leave "
    "in_backward out, or access it in a hook on the parameter (register_hook)."
)
SECOND_BACKWARD = (
    "a second backward ran before optimizer.step(): step-in-backward cannot accumulate gradients, because they are "
    "already used. Leave in_backward out, or do not accumulate gradients."
)
EARLY = (
    "parameters or optimizer state are accessed between backward and optimizer.step(): step-in-backward has already "
    "updated them. Leave in_backward out, or access them before backward or after the step."
)
AVERAGED = (
    "a gradient is read or changed inside backward after it was complete, as DistributedDataParallel does to average "
    "it: step-in-backward has already used it. Leave in_backward out, or shard instead."
)
DISTRIBUTED = (
    "DistributedDataParallel sums gradients after they are complete; a step inside backward would run before that. "
    "Use sharding, or leave in_backward out."
)
SCALED = (
    "a GradScaler scales the loss: step-in-backward would update with scaled gradients. Use bf16, which needs no "
    "scaling, or leave in_backward out."
)
NEVER_RESET = (
    "gradients are not reset between optimizer.step() and the next backward: step-in-backward cannot accumulate them, "
    "because they are already used. Leave in_backward out, or call zero_grad() in each step."
)
SETTINGS_CHANGED = (
    "the optimizer's settings (such as the learning rate) were changed between backward and optimizer.step(); "
    "step-in-backward used the old ones. Change them before backward."
)

FUSED_SGD = "torch's fused SGD does not update parameters of 16 bits on a CPU; write foreach, or leave loop out."
#: A note of runs, where gradients change: their updates run as without the policy.
NOT_FUSED = (
    "Some updates ran in a loop: a fused kernel would not update these parameters correctly, since their gradients are "
    "sparse or laid out in memory in another way."
)


def clipped(function: str) -> str:
    """Returns the sentence for gradients that a function of torch.nn.utils clips."""
    return (
        f"torch.nn.utils.{function} was called: step-in-backward cannot clip gradients, because they are already used. "
        "Leave in_backward out, or do not clip."
    )


TOGETHER = (
    "the optimizer computes a setting of its step, such as a rate, from the gradients or state of all parameters, "
    "as Prodigy does; it cannot update one parameter at a time. Leave in_backward, one_by_one and host out."
)


def needs_whole(kind: str) -> str:
    """Returns the sentence for an optimizer that cannot update without a closure."""
    return (
        f"{kind} recomputes the loss inside its step and needs all parameters there; it cannot update one parameter at "
        "a time. Leave in_backward, one_by_one and host out."
    )


def no_form(kind: str, loop: str) -> str:
    """Returns the sentence for an optimizer without an update form."""
    return f"{kind} has no {loop} form for these parameters; leave loop out."


def refuse_optimizers(step: Step, policy: OptimizerPolicy) -> None:
    """Rejects recorded optimizers that lack the update form, or that need all parameters at once or after backward.

    Raises:
        PolicyError: There is one.
    """
    if policy.in_backward and CHANGES_SETTINGS in step.usages:
        raise PolicyError(SETTINGS_CHANGED)
    if policy.in_backward and "DistributedDataParallel" in step.modules.type:
        raise PolicyError(DISTRIBUTED)
    for optimizer in step.optimizers:
        if policy.loop and not optimizer.has_form(policy.loop):
            raise PolicyError(no_form(optimizer.name, policy.loop))
        if policy.in_backward or policy.state == "host":
            refuse_closure(optimizer)


def refuse_closure(optimizer: OptimizerTraits) -> None:
    """Rejects a recorded optimizer that cannot update one parameter at a time, because it needs a closure.

    Raises:
        PolicyError: It does.
    """
    if NEEDS_CLOSURE in optimizer.words:
        raise PolicyError(needs_whole(optimizer.name))
