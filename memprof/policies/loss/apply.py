"""Replaces torch's cross-entropy with a chunked one while a plan is applied."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from memprof.errors import PolicyError
from memprof.policies.loss.cross_entropy import ChunkedCrossEntropy, ChunkedHead, Terms
from memprof.policies.loss.lazy import LazyLogits, lazy_logits
from memprof.policies.plan.patterns import match_modules
from memprof.policies.runtime.replaced import OWN_TYPES, is_in_transform, until_gone
from memprof.recorder.calls.torch_state import is_in_checkpoint

if TYPE_CHECKING:
    from memprof.policies.loss.policy import ChunkedLoss
    from memprof.policies.runtime.job import Job

Tensor = torch.Tensor

_REPLACEMENT = "__memprof_cross_entropy__"

_PARAMETERS = (
    "input",
    "target",
    "weight",
    "size_average",
    "ignore_index",
    "reduce",
    "reduction",
    "label_smoothing",
)


def apply(job: Job, policy: ChunkedLoss) -> None:
    """Replaces torch.nn.functional.cross_entropy, and makes the chosen head's output lazy.

    Raises:
        PolicyError: The head is not one Linear, or this torch's cross_entropy is not the known one.
    """
    heads = _heads(job, policy)
    function = F.cross_entropy
    _check_known(function)
    # A job may train several models, or a copy of one: torch's function is replaced once, and the last plan decides.
    loss = _Loss(job, policy, _in_force[-1].original if _in_force else _copy(function))
    if not _in_force:
        _replace_code(function)
    _in_force.append(loss)
    job.guard(job.model)
    job.on_undo(until_gone(job.model, partial(_leave, loss, function)))
    for head in heads:
        job.wrap_forward(head, partial(loss.head_forward, head))


class _Loss:
    """Cross-entropy as a policy computes it.

    Attributes:
        original: torch's own function.
    """

    def __init__(self, job: Job, policy: ChunkedLoss, original: Any) -> None:
        self._job = weakref.ref(job)  # the model keeps the job: the active replacement must not keep the model
        self._policy = policy
        self._effect = job.expect(policy.describe(), "no cross-entropy of its size was computed")
        self._effect.is_tried = True
        self.original = original

    def head_forward(self, head: torch.nn.Linear, before: Any) -> Any:
        """Returns a forward that defers the logits while training."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden: Any = args[0] if args else kwargs.get("input")
            is_plain = type(hidden) in OWN_TYPES and hidden.dim() > 1
            if not is_plain or not torch.is_grad_enabled() or torch.compiler.is_compiling() or is_in_transform():
                return before(*args, **kwargs)
            # Reentrant checkpointing recomputes a forward within backward, and passes its result to autograd; the other
            # kind must save the same tensors again.
            if torch._C._current_graph_task_id() != -1 and not is_in_checkpoint():
                return before(*args, **kwargs)
            if hidden.numel() // hidden.shape[-1] * head.out_features * 4 < self._policy.minimum_bytes:
                return before(*args, **kwargs)
            if hidden.dtype != head.weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
                # Called outside the model, whose forward casts under pure-bf16.
                self._note(
                    f"loss: logits are computed at once where the head is called with {hidden.dtype} and has "
                    f"{head.weight.dtype}."
                )
                return before(*args, **kwargs)
            return lazy_logits(head, hidden, partial(self._around_uses, head))

        return forward

    def _note(self, sentence: str) -> None:
        job = self._job()
        if job is not None:
            job.note(sentence)

    def _around_uses(self, head: torch.nn.Linear) -> AbstractContextManager[None]:
        job = self._job()
        return nullcontext() if job is None else job.around_uses([*head.parameters(recurse=False)])

    def cross_entropy(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Computes supported large calls of cross-entropy by chunks; leaves the others to torch."""
        others = (size_average, ignore_index, reduce, reduction, label_smoothing)
        reason = self._reason_against(logits, target, weight, others)
        if reason is not None:
            if reason:
                self._note(f"loss: a cross-entropy is not computed in chunks: {reason}.")
            if isinstance(logits, LazyLogits):
                logits = logits.logits()
            return self.original(logits, target, weight, *others)  # type: ignore[no-any-return]
        self._effect.is_done = True
        terms = Terms(
            self.original, -(-len(logits) // self._policy.chunks), ignore_index, reduction, float(label_smoothing)
        )
        if not isinstance(logits, LazyLogits):
            return self._chunked(logits, target, weight, terms)
        if logits.made is None and logits.dim() == 2:
            apply: Callable[..., Tensor] = ChunkedHead.apply
            with logits.in_use():
                return apply(logits.hidden, logits.matrix, logits.bias, target, weight, terms, logits.make)
        return self._chunked(logits.logits(), target, weight, terms)

    def _chunked(self, *args: Any) -> Tensor:
        apply: Callable[..., Tensor] = ChunkedCrossEntropy.apply
        return apply(*args)

    def _reason_against(
        self, logits: Tensor, target: Tensor, weight: Tensor | None, others: tuple[Any, ...]
    ) -> str | None:
        """Returns why a call is left to torch; "" without a reason worth reporting, None where it is chunked."""
        size_average, _, reduce, reduction, _ = others
        if torch.compiler.is_compiling() or is_in_transform():
            return "it runs compiled or under torch.func"
        for tensor, kinds in ((logits, (*OWN_TYPES, LazyLogits)), (target, OWN_TYPES)):
            if type(tensor) not in kinds:
                return "it is called with a tensor subclass"
        if not logits.requires_grad or not torch.is_grad_enabled():
            return ""
        if logits.numel() * logits.element_size() < self._policy.minimum_bytes or logits.dim() < 2:
            return ""
        if len(logits) < 2 or len(logits) != len(target):
            return "it has only one row" if len(logits) == len(target) else ""
        if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
            return "it is called with size_average or reduce"
        if target.requires_grad or (weight is not None and weight.requires_grad):
            return "its targets or weights need gradients"
        if not target.is_floating_point() and target.dtype != torch.int64:
            return f"its targets are {target.dtype}"
        return None


#: The active losses of all plans; calls go to the last one.
_in_force: list[_Loss] = []


def _heads(job: Job, policy: ChunkedLoss) -> list[torch.nn.Linear]:
    if not policy.head:
        return []
    modules = job.modules_named()
    names = match_modules([policy.head], modules)
    heads = []
    for name in names:
        module = modules[name]
        if type(module) is not torch.nn.Linear:
            raise PolicyError(
                f"loss: the head {name!r} is a {type(module).__name__}, not a Linear; name the Linear that computes "
                "the logits."
            )
        heads.append(module)
    return heads


def _check_known(function: Any) -> None:
    if not isinstance(function, FunctionType) or tuple(inspect.signature(function).parameters) != _PARAMETERS:
        raise PolicyError("loss: torch.nn.functional.cross_entropy has already been replaced.")


def _copy(function: Any) -> Any:
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _replace_code(function: Any) -> None:
    """Makes the function call the current replacement, including for earlier imports: only its code is exchanged."""
    scope: dict[str, Any] = {}
    arguments = ", ".join(_PARAMETERS)
    exec(f"def cross_entropy({arguments}):\n    return {_REPLACEMENT}({arguments})\n", scope)  # noqa: S102 - our own text
    function.__globals__[_REPLACEMENT] = _cross_entropy
    function.__code__ = scope["cross_entropy"].__code__


def _cross_entropy(*args: Any) -> Tensor:
    return _in_force[-1].cross_entropy(*args)


def _leave(loss: _Loss, function: Any) -> None:
    _in_force.remove(loss)
    if not _in_force:
        function.__code__ = loss.original.__code__
        del function.__globals__[_REPLACEMENT]
