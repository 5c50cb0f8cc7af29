"""Scales gradients inside a model that computes in fp16, so that the script never handles a scaled one.

``torch.amp.GradScaler`` requires the script to scale its loss, unscale before clipping, and step through it. Here
gradients are multiplied where they enter the model (its outputs) and divided where they leave it (its parameters and
inputs), so loss, clipping and logging are unchanged. GradScaler itself skips steps that overflowed and adjusts the
scale.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from memprof.errors import PolicyError
from memprof.policies.precision.policy import CREATE_GRAPH, NOT_OF_OUTPUT
from memprof.policies.runtime.replaced import is_in_transform, replace_weakly

if TYPE_CHECKING:
    from memprof.policies.runtime.job import Job


class LossScaling:
    """The scale of one job's gradients."""

    def __init__(self, job: Job) -> None:
        """Replaces ``step`` of the job's optimizers, and hooks its parameters."""
        # GradScaler starts at 2**16 and skips the first steps of most models; it typically settles at this value.
        self.scaler = _Unscaled(job.device.type, init_scale=2.0**12)
        self.scale = torch.ones((), device=job.device)
        self.inverse = self.scale
        self._refresh()
        self._is_scaled = False
        self._task = -1
        self._hooked: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self.watch(job.model.parameters())
        job.on_undo(self._unhook)
        for name in ("backward", "grad"):
            job.on_undo(replace_weakly(torch.autograd, name, self._differentiate))
        for optimizer in job.optimizers:
            self._take_over(job, optimizer)
        job.notes.append(
            "precision: gradients are scaled inside the model for fp16, and a step whose gradients overflow is skipped."
            if job.optimizers
            else "precision: no optimizer found, so a step whose fp16 gradients overflow is not skipped."
        )

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Hooks new parameters so that their gradients leave unscaled: thawed, added, or given for one call."""
        for parameter in parameters:
            if not parameter.requires_grad:
                continue
            known = self._hooked.get(id(parameter))
            if known is None or known[0]() is not parameter:
                hook = parameter.register_hook(self._unscale)  # type: ignore[no-untyped-call]
                self._hooked[id(parameter)] = weakref.ref(parameter), hook

    def _unhook(self) -> None:
        for _, hook in self._hooked.values():
            hook.remove()
        self._hooked.clear()

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Wraps an input of the model, so that its gradient leaves unscaled."""
        if is_in_transform():
            return tensor
        return _Enter.apply(tensor, self) if tensor.requires_grad and torch.is_grad_enabled() else tensor  # type: ignore[no-untyped-call]

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """Casts an output of the model to float32, so that its gradient enters scaled."""
        if tensor.requires_grad and torch.is_grad_enabled() and not is_in_transform():
            scaled: torch.Tensor = _Leave.apply(tensor, self)  # type: ignore[no-untyped-call]
            return scaled
        return tensor.float() if tensor.dtype == torch.float16 else tensor

    def begin(self) -> None:
        """Marks the current backward as carrying scaled gradients until it ends.

        Raises:
            PolicyError: Its gradients will be differentiated, which would divide them by the scale twice.
        """
        if torch.is_grad_enabled():
            raise PolicyError(CREATE_GRAPH)
        task = torch._C._current_graph_task_id()
        if not self._is_scaled or task != self._task:
            # A different task means that the previous one was aborted by an exception.
            self._is_scaled, self._task = True, task
            # A backward that never reaches the model's outputs (a penalty on weights alone) is not scaled.
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._is_scaled = False

    def _unscale(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return gradient * self.inverse if self._is_scaled else None

    def _differentiate(self, before: Any, *args: Any, **kwargs: Any) -> Any:
        """Checks the roots before differentiation: ``tensors`` of ``backward``, ``outputs`` of ``grad``."""
        roots = args[0] if args else kwargs.get("tensors", kwargs.get("outputs", ()))
        if torch._C._current_graph_task_id() == -1:
            self._require_outputs([roots] if isinstance(roots, torch.Tensor) else list(roots))
        return before(*args, **kwargs)

    def _require_outputs(self, roots: list[torch.Tensor]) -> None:
        """Checks that a loss reaches parameters only through the model's outputs, where its gradient is scaled."""
        waiting = [root.grad_fn for root in roots if isinstance(root, torch.Tensor)]
        seen: set[Any] = set()
        has_left = goes_round = False
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if getattr(node, "scaling", None) is self:
                has_left = True
                continue
            known = self._hooked.get(id(getattr(node, "variable", None)))
            goes_round |= known is not None and known[0]() is getattr(node, "variable", None)
            waiting += [following for following, _ in node.next_functions]
        if has_left and goes_round:
            raise PolicyError(NOT_OF_OUTPUT)

    def _refresh(self) -> None:
        self.scale = self.scaler.scale(torch.ones_like(self.scale))
        self.inverse = self.scale.reciprocal()

    def _take_over(self, job: Job, optimizer: torch.optim.Optimizer) -> None:
        """Adds the overflow check to the optimizer's step."""
        had_own = "step" in optimizer.__dict__
        before = optimizer.step
        scaler = self.scaler
        is_inside = False

        @functools.wraps(before)
        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside or not any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                return before(*args, **kwargs)
            closure = kwargs.pop("closure", None) if "closure" in kwargs else (args[0] if args else None)
            # torch's optimizers first run a closure once; its gradients must exist before the check.
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            is_inside = True
            try:
                scaler.unscale_(optimizer)
                result = scaler.step(optimizer)
                scaler.update()
            finally:
                is_inside = False
            self._refresh()
            return loss if closure is not None else result

        # A bound method, because learning rate schedulers read its __func__.
        optimizer.__dict__["step"] = types.MethodType(step, optimizer)

        def restore() -> None:
            if had_own:
                optimizer.__dict__["step"] = before
            else:
                optimizer.__dict__.pop("step", None)

        job.on_undo(restore)


class _Unscaled(torch.amp.GradScaler):
    """A GradScaler for gradients that are already unscaled: checks them, skips steps, and adjusts the scale."""

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> Any:
        return super()._unscale_grads_(optimizer, torch.ones_like(inv_scale), found_inf, allow_fp16)


class _Leave(torch.autograd.Function):
    """Float32 outside; the gradient is multiplied by the scale on its way in."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, scaling: LossScaling) -> torch.Tensor:
        context.scaling, context.dtype = scaling, tensor.dtype
        if tensor.dtype == torch.float16:
            return tensor.float()
        # The job may change a loss in place, which torch rejects for a view.
        return tensor.clone() if tensor.numel() == 1 else tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        context.scaling.begin()
        return (gradient * context.scaling.scale).to(context.dtype), None


class _Enter(torch.autograd.Function):
    """The same tensor inside; its gradient is divided by the scale on its way out."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, scaling: LossScaling) -> torch.Tensor:
        context.scaling = scaling
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * context.scaling.inverse, None
