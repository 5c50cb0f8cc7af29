"""A cross-entropy, and the Linear before it, as recorded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memprof.trace.schema import Bools, Ints
from memprof.trace.step import Step


@dataclass(frozen=True)
class CrossEntropy:
    """A cross-entropy as torch runs it: a log-softmax and a negative log-likelihood, and the backward of both.

    Attributes:
        log_softmax: Forward operator.
        likelihood: Forward operator.
        backward: Backward operators of both, in order.
        logits: Storage of the logits.
        whole: Storages as large as the logits that chunks need not: the log-softmax, its gradient, a cast of autocast.
        gradient: Storage of the logits' gradient.
        targets: Storages of targets and class weights.
        loss: Storage of the loss.
        upstream: Storage of the loss's gradient.
        removed: Every operator of it.
        rows: Rows that the loss is of.
        is_cast_by_model: Whether the model casts the logits to float32, which drops the others; autocast keeps both.
    """

    log_softmax: int
    likelihood: int
    backward: Ints
    logits: int
    whole: Ints
    gradient: int
    targets: Ints
    loss: int
    upstream: int
    removed: Ints
    rows: int
    is_cast_by_model: bool


@dataclass(frozen=True)
class Head:
    """The Linear that makes the logits.

    Attributes:
        removed: Its operators, forward and backward, and the views of the logits and of their gradient.
        hidden: Storage of its input.
        copied: Storage of a copy of the input that makes its rows contiguous, else NONE.
        casts: Storages of the parameters in autocast's type, made by its forward.
        parameters: Storages of its matrix and, maybe, its bias.
        of_hidden: Storage of its input's gradient, NONE where it needs none.
        of_parameters: Storages of the parameters' gradients as it makes them.
        whole: Storages that are not made any more.
        flops: Operations of the forward product.
        forward_us: What its forward takes.
        module_id: The module.
    """

    removed: Ints
    hidden: int
    copied: int
    casts: Ints
    parameters: Ints
    of_hidden: int
    of_parameters: Ints
    whole: Ints
    flops: int
    forward_us: float
    backward_us: float
    module_id: int


def linear_modules(step: Step) -> Bools:
    """Marks the modules that are one torch Linear: a wrapper around one, such as an adapter's, has modules inside.

    Returns:
        One value for each row of ``step.modules``.
    """
    modules = step.modules
    found: Bools = (modules.type == "Linear") & ~np.isin(modules.module_id, modules.parent_id)
    return found
