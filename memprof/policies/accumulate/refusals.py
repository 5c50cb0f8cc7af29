"""Why accumulate is refused."""

from __future__ import annotations

LBFGS = (
    "accumulate does not support LBFGS, which calls its closure many times in a step; use another optimizer, or "
    "evaluate the whole batch in the closure."
)
DROPPED = (
    "accumulate cannot keep this job's gradients: its loop clears some with zero_grad() before any "
    "step() has used them, as when two networks train in turn; train without accumulate."
)
CHANGED = (
    "accumulate cannot keep this job's gradients: its loop changes them between backward and step(), which would "
    "happen once for each micro-batch. Clip with torch.nn.utils.clip_grad_norm_, which is delayed until they are "
    "complete, or train without accumulate."
)
BY_HAND = (
    "accumulate sums the gradients that backward() writes to p.grad, but this loop sets gradients itself "
    "(torch.autograd.grad, torch.func) before step(). Call backward(), or train without accumulate."
)
NOT_A_MEAN = (
    "accumulate cannot split a loss computed from gradients of the parameters (torch.autograd.grad with "
    "create_graph=True): it is not a mean over the samples. Train without accumulate."
)
WEIGHED = (
    "accumulate cannot split a loss whose weights are computed from gradients of the parameters "
    "(torch.autograd.grad before backward): each micro-batch would have weights of its own. Train without accumulate."
)
IN_TURN = (
    "accumulate does not fit this loop: it calls backward() again after step() on the same batch, as when two networks "
    "train in turn, but micro-batches update once, after the last of them; train without accumulate."
)
HOOKS = (
    "accumulate: a hook runs when a gradient is complete (register_post_accumulate_grad_hook) and would run once for "
    "each micro-batch; use register_hook, or train without accumulate."
)
IN_EVALUATION = "the model was in evaluation mode when the DataLoader yielded them"


def left_whole(why: str, micro_batches: int) -> str:
    """Returns the sentence for batches that are not split.

    Args:
        why: The reason, a clause.
        micro_batches: Number of micro-batches wanted.
    """
    return (
        f"accumulate cannot split this job's batches: {why}; in the training loop, write "
        f"'for part in memprof.micro_batches(batch, {micro_batches}):' around forward, backward and step()."
    )
