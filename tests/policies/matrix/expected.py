"""What policies refuse on purpose, each with its sentence: any other refusal is a failure."""

from __future__ import annotations

import re

from memprof.policies.base import Policy
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.swap.policy import Swap

_BACKWARD_TWICE = r"a second backward ran before optimizer\.step\(\)"
_GRADIENT_READ = r"a gradient is read or changed after backward: step-in-backward has already used"
_NOT_A_MEAN = r"accumulate cannot split a loss computed from gradients of the parameters"
_BY_HAND = r"accumulate sums the gradients that backward\(\) writes to p\.grad, but this loop sets gradients itself"
_DROPPED = r"accumulate cannot keep this job's gradients: its loop clears some with zero_grad\(\)"
_NOT_OF_OUTPUT = r"precision: part of the loss does not come from the model's output"
_CREATE_GRAPH = r"precision: gradients are computed with create_graph=True, which fp16 loss scaling does not support"

#: By policy, as ``key_of`` names it, and usage.
REFUSALS: dict[str, dict[str, str]] = {
    "accumulate": {
        "gradients_of_gradients": _NOT_A_MEAN,
        "gradients_by_autograd_grad": _BY_HAND,
        "per_sample_gradients": _BY_HAND,
        "a_step_left_after_backward": _DROPPED,
        "a_gradient_that_is_not_finite": _DROPPED,
        "two_networks_in_turn": r"accumulate does not fit this loop: it calls backward\(\) again after step\(\)",
        "hooks_after_a_gradient_made_before": r"accumulate: a hook runs when a gradient is complete",
        "training_in_eval_mode": r"accumulate cannot split this job's batches: .* the model was in evaluation mode",
        "clipping_by_hand": r"its loop changes them between backward and step\(\)",
        "lbfgs": r"accumulate does not support LBFGS",
    },
    "checkpoint": {"spectral_norm": r"changes an input or a buffer of its own in place, so its forward"},
    "precision fp16": {
        "gradient_penalty": _CREATE_GRAPH,
        "gradients_of_gradients": _CREATE_GRAPH,
        "features_by_a_hook": _NOT_OF_OUTPUT,
        "a_penalty_on_weights": _NOT_OF_OUTPUT,
        "lbfgs": r"precision: LBFGS runs the model several times per step",
    },
    "optimizer in-backward": {
        "a_second_backward": _BACKWARD_TWICE,
        "two_losses": _BACKWARD_TWICE,
        "an_error_in_backward": _BACKWARD_TWICE,
        "a_step_left_after_backward": _BACKWARD_TWICE,
        "two_networks_in_turn": _BACKWARD_TWICE,
        "accumulation_of_the_jobs_own": _BACKWARD_TWICE,
        "a_gradient_that_is_not_finite": _GRADIENT_READ,
        "clipping_by_hand": _GRADIENT_READ,
        "gradients_read": _GRADIENT_READ,
        "distributed_afterwards": r"as DistributedDataParallel does to average it: step-in-backward has",
        "clipping_by_norm": r"torch\.nn\.utils\.clip_grad_norm_ was called: step-in-backward cannot clip gradients",
        "clipping_by_value": r"torch\.nn\.utils\.clip_grad_value_ was called: step-in-backward cannot clip gradients",
        "gradients_never_reset": r"gradients are not reset between optimizer\.step\(\) and the next backward",
        "gradient_scaler": r"a GradScaler scales the loss: step-in-backward would update with scaled gradients",
        "gradient_scaler_with_clipping": r"a GradScaler scales the loss",
        "rate_set_by_hand": r"settings \(such as the learning rate\) were changed between backward and",
        "another_kind_of_optimizer_in_the_middle": r"with the optimizer created last for them",
        "lbfgs": r"LBFGS recomputes the loss inside its step|LBFGS has no",
    },
    "swap optimizer": {"lbfgs": r"swap cannot move LBFGS' state"},
    "optimizer": {"lbfgs": r"LBFGS has no (loop|foreach|fused) form for these parameters; leave loop out"},
}

#: What two policies refuse only together: with its head, the loss reads parameters beside the model's output.
REFUSED_TOGETHER: dict[tuple[str, str], dict[str, str]] = {
    ("precision fp16", "loss"): {"gradient_penalty": _NOT_OF_OUTPUT, "two_networks_in_turn": _NOT_OF_OUTPUT},
}

#: What a job does late, and is refused then: nothing shows it before.
LATE = {
    "a_step_left_after_backward",
    "another_kind_of_optimizer_in_the_middle",
    "gradients_never_reset",
    "two_networks_in_turn",
}

#: What ends with an error of torch's own or differs, by policy and usage, and why.
LIMITATIONS: dict[str, dict[str, str]] = {
    "compile": {"traced": "torch.jit.trace refuses a compiled module, whoever has compiled it"},
    "precision pure-bf16": {
        "teacher_by_hand": "lerp between a float32 copy and bfloat16 weights: torch refuses two types",
    },
}

#: A way out is one of these words.
WAYS_OUT = re.compile(
    r"\b(write|leave|use|choose|call|train without|make|give|return|take|change|set|apply|swap|clip|shard|evaluate)\b",
    re.IGNORECASE,
)


def key_of(policy: Policy) -> str:
    """Names a policy's settings as the tables above do."""
    if isinstance(policy, Precision):
        return policy.describe()
    if getattr(policy, "in_backward", False):
        return "optimizer in-backward"
    return f"swap {policy.what}" if isinstance(policy, Swap) else policy.name


def expected_refusals(plan: Plan, usage: str) -> list[str]:
    """Returns the patterns of the sentences with which a plan may refuse a usage."""
    keys = [key_of(policy) for policy in plan.policies]
    tables = [REFUSALS.get(key, {}) for key in keys]
    tables += [table for pair, table in REFUSED_TOGETHER.items() if set(pair) <= set(keys)]
    return [table[usage] for table in tables if usage in table]


def limitation(plan: Plan, usage: str) -> str:
    """Returns why a usage does not work under a plan, "" where it has to."""
    return next(
        (why for policy in plan.policies if (why := LIMITATIONS.get(key_of(policy), {}).get(usage)) is not None), ""
    )
