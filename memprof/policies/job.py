"""A training job as the policies see it: its model, its optimizers, and what was done to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch


class Job:
    """What a plan is applied to.

    Attributes:
        model: The root module.
        optimizers: The optimizers of its parameters, possibly none yet.
        notes: Sentences for the user about what was done, or what a policy left alone.
    """

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Takes the model and its optimizers; changes nothing."""
        self.model = model
        self.optimizers = list(optimizers)
        self.notes: list[str] = []
        self._undo = ExitStack()

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter or buffer; cpu where it has neither."""
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            return tensor.device
        return torch.device("cpu")

    @property
    def has_parts(self) -> bool:
        """Whether this process holds parts of the parameters, as DTensors: shard in stages 2 and 3."""
        return any(kind.__name__ == "DTensor" for each in self.model.parameters() for kind in type(each).__mro__)

    @property
    def averages(self) -> bool:
        """Whether gradients are changed once they are complete, as shard does in stages 0 and 1."""
        return any(getattr(each, "_post_accumulate_grad_hooks", None) for each in self.model.parameters())

    def modules_named(self) -> dict[str, torch.nn.Module]:
        """Returns every module by its qualified name, the root as "", as in named_modules()."""
        return dict(self.model.named_modules())

    def on_undo(self, action: Callable[[], Any]) -> None:
        """Registers what takes one change back."""
        self._undo.callback(action)

    def undo(self) -> None:
        """Takes every change back, the last one first."""
        self._undo.close()

    def wrap_forward(self, module: torch.nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replaces a module's forward with one made from it; wraps nest, the last is the outermost.

        Args:
            module: The module.
            wrap: Given the forward as it is, returns the new one.
        """
        had_own = "forward" in module.__dict__
        before = module.forward

        def restore() -> None:
            if had_own:
                module.__dict__["forward"] = before
            else:
                module.__dict__.pop("forward", None)

        module.__dict__["forward"] = wrap(before)
        self.on_undo(restore)
