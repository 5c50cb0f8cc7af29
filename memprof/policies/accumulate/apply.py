"""Makes an unmodified training loop accumulate gradients over micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler

from memprof.errors import PolicyError
from memprof.policies.accumulate.gate import Gates, refuse_many_evaluations
from memprof.policies.accumulate.policy import HOOKS, NOT_A_MEAN, Accumulate
from memprof.policies.accumulate.round import ACTIVE, Round
from memprof.policies.accumulate.split import BatchFeed, is_batch_in_hand, split_from_start, take_prepared
from memprof.policies.accumulate.watch import refuse_gradients_of_gradients, require_backward
from memprof.policies.runtime.job import Job
from memprof.policies.runtime.replaced import cell_of_body, replace, until_gone
from memprof.recorder.steps.usages import has_gradient_hooks

_SCALER = torch.amp.GradScaler


def start(policy: Accumulate) -> None:
    """Splits batches from the job's start; `apply` does the rest once the model exists."""
    split_from_start(policy.micro_batches)


def apply(job: Job, policy: Accumulate) -> None:
    """Splits batches, weights gradients, and defers the calls that end a step.

    Raises:
        PolicyError: The job has no optimizer, or one that evaluates its closure many times.
    """
    job.require_optimizer("accumulate")
    for each in job.optimizers:
        refuse_many_evaluations(each)
    if any(map(has_gradient_hooks, job.model.parameters())):
        raise PolicyError(HOOKS)
    shared = _in_force[0] if _in_force else _begin(policy)
    if shared.micro_batches != policy.micro_batches:
        raise PolicyError(
            f"accumulate: the batches of this process are already split into {shared.micro_batches}; use one number of "
            "micro-batches for all models."
        )
    job.on_undo(until_gone(job.model, shared.leave))
    shared.users += 1
    shared.feed.follow(job.model)
    # Applied in the middle of a batch that was yielded whole: splitting starts with the next one.
    is_first_whole = shared.is_first_whole or bool(shared.feed.round.reason)
    for each in job.optimizers:
        if shared.gates.of(each) is None:
            shared.gates.add(each, is_first_whole=is_first_whole)
            job.on_undo(partial(shared.gates.drop, each))
    job.notes += _notes(job, policy, is_first_whole=is_first_whole)


@dataclass(eq=False)
class _Shared:
    """State shared by all models of a process under the plan, a model and its copies included.

    Attributes:
        micro_batches: Parts per batch.
        feed: Splits the batches.
        is_first_whole: The loop was already running when the policy was applied.
        gates: The gates of all optimizers.
        users: Number of models that share it.
        undo: Reverts everything when the last user leaves.
    """

    micro_batches: int
    feed: BatchFeed
    is_first_whole: bool
    gates: Gates
    undo: ExitStack
    users: int = 0

    def leave(self) -> None:
        """Removes one user; the last one reverts everything."""
        self.users -= 1
        if not self.users:
            _in_force.remove(self)
            self.undo.close()


#: The shared state in force, if any.
_in_force: list[_Shared] = []


def _begin(policy: Accumulate) -> _Shared:
    """Starts splitting batches and deferring the calls that end a step."""
    feed = take_prepared(policy.micro_batches)
    is_first_whole = feed is None and is_batch_in_hand()
    if feed is None:
        feed = BatchFeed(Round(policy.micro_batches))
        feed.install()
    undo, current = ExitStack(), feed.round
    undo.callback(feed.remove)
    ACTIVE.append(current)
    undo.callback(ACTIVE.remove, current)
    gates = Gates(undo, current)
    undo.callback(gates.remove)
    gates.watch()
    refuse_gradients_of_gradients(undo, current)
    _weigh_gradients(undo, current, gates)
    _gate_model_zero_grad(undo, gates)
    _gate_clipping(undo, gates)
    _gate_scaler(undo, gates)
    _gate_schedulers(undo, gates)
    shared = _Shared(policy.micro_batches, feed, is_first_whole, gates, undo)
    _in_force.append(shared)
    return shared


def _weigh_gradients(undo: ExitStack, current: Round, gates: Gates) -> None:
    """Seeds each backward with the micro-batch's share of the samples instead of 1.

    Parts of unequal size thus add up to the mean over the batch, and clipping, a scaler or a hook always see
    gradients of the usual scale. Costs no memory and no pass over the gradients.
    """

    def wrap(before: Any) -> Any:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            # Nested in a backward (reentrant activation checkpointing), gradients are already weighted.
            is_outermost = torch._C._current_graph_task_id() == -1
            if is_outermost:
                if current.is_split and kwargs.get("create_graph", args[1] if len(args) > 1 else False):
                    raise PolicyError(NOT_A_MEAN)
                weight = current.begin_backward()
                if weight != 1.0 and kwargs.get("grad_variables") is None:
                    grad_tensors = _weighed(tensors, grad_tensors, weight)
            before(tensors, grad_tensors, *args, **kwargs)
            if is_outermost:
                current.backwards_here += 1
                gates.gradients.note()

        return backward

    undo.callback(replace(torch.autograd, "backward", wrap))


def _weighed(tensors: Any, gradients: Any, weight: float) -> Any:
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    given = [gradients] if gradients is None or isinstance(gradients, torch.Tensor) else list(gradients)
    given += [None] * (len(roots) - len(given))
    return [
        gradient * weight
        if gradient is not None
        # Without a gradient only a scalar can be differentiated; backward itself raises for the others.
        else torch.full_like(root, weight)
        if root.numel() == 1 and root.requires_grad
        else None
        for root, gradient in zip(roots, given, strict=False)
    ]


def _gate_model_zero_grad(undo: ExitStack, gates: Gates) -> None:
    """Defers zero_grad() of the model, its submodules and its copies, as an optimizer's."""

    def wrap(before: Any) -> Any:
        def zero_grad(*args: Any, **kwargs: Any) -> None:
            if not gates.is_open:
                before(*args, **kwargs)

        return zero_grad

    undo.callback(replace(torch.nn.Module, "zero_grad", wrap))


def _gate_clipping(undo: ExitStack, gates: Gates) -> None:
    """Clips only right before an update, when the gradients are those of the whole batch.

    A script may have imported clip_grad_norm_ by name; the function that does the clipping inside it is looked up in
    torch's module, so that one is replaced.
    """

    def wrap(before: Any) -> Any:
        def clip(*args: Any, **kwargs: Any) -> Any:
            return before(*args, **kwargs) if gates.closes else None

        return clip

    undo.callback(replace(clip_grad, "_clip_grads_with_norm_", wrap))
    undo.callback(replace(torch.nn.utils, "clip_grads_with_norm_", wrap))
    undo.callback(replace(cell_of_body(clip_grad.clip_grad_value_), "cell_contents", wrap))


def _gate_scaler(undo: ExitStack, gates: Gates) -> None:
    """Defers what a GradScaler does before an update: gradients stay scaled until the last micro-batch."""

    def wrap_step(before: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            gate = gates.of(optimizer)
            if gate is None or gate.closes:
                result = before(scaler, optimizer, *args, **kwargs)
                if gate is not None:
                    gate.close()  # the scaler skips the optimizer where a gradient is not finite
                return result
            gate.require_micro_batches()
            require_backward(gates.round)
            gate.hold_back()
            return None

        return step

    def wrap_unscale(before: Any) -> Any:
        def unscale_(scaler: Any, optimizer: Any) -> None:
            gate = gates.of(optimizer)
            if gate is None or gate.closes:
                before(scaler, optimizer)

        return unscale_

    def wrap_update(before: Any) -> Any:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> None:
            if not gates.is_open:
                before(scaler, *args, **kwargs)

        return update

    undo.callback(replace(_SCALER, "step", wrap_step))
    undo.callback(replace(_SCALER, "unscale_", wrap_unscale))
    undo.callback(replace(_SCALER, "update", wrap_update))


def _gate_schedulers(undo: ExitStack, gates: Gates) -> None:
    """Defers LR schedulers that step once per batch; per-epoch ones step as usual, when no update is pending."""

    def wrap(before: Any) -> Any:
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
            gate = gates.of(getattr(scheduler, "optimizer", None))
            if gate is None or not gates.is_open:
                before(scheduler, *args, **kwargs)

        return step

    for kind in {LRScheduler, *_subclasses(LRScheduler)}:
        if "step" in vars(kind):
            undo.callback(replace(kind, "step", wrap))


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _notes(job: Job, policy: Accumulate, *, is_first_whole: bool) -> list[str]:
    parts = policy.micro_batches
    notes = [
        (
            f"The loop gets each training batch as up to {parts} micro-batches, one after the other: step(), "
            "zero_grad(), clipping, GradScaler and LR schedulers take effect at the last of them; counts, prints and "
            "averages of the loop itself are per micro-batch, and len(loader) still counts whole batches."
        ),
        (
            "Gradients are averaged over the micro-batches by their number of samples, which is right for a loss that "
            "is a mean over its batch."
        ),
    ]
    if is_first_whole:
        notes.append("The batch that was already loaded when accumulate was applied is not split; the next one is.")
    norms = sum(isinstance(each, torch.nn.modules.batchnorm._BatchNorm) for each in job.model.modules())
    if norms:
        notes.append(
            f"{norms} BatchNorm layers take their statistics over one micro-batch instead of the whole batch, and move "
            f"their running statistics up to {parts} times a step: results differ from the plain run."
        )
    return notes
