"""Passes what a model returned back to it in its own type, such as hidden states while a job generates text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary


class Returned:
    """Results that left a model as float32 copies while it was not trained: in eval mode, or with autograd off.

    In training, float32 results that are passed back stay float32, as predicted from the recorded steps.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Starts with none.

        Args:
            model: The model that returns them.
        """
        self._model = model
        self._dtypes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @property
    def is_trained(self) -> bool:
        """Whether the current call of the model may be part of a training step."""
        return self._model.training and torch.is_grad_enabled()

    def noting(self, leave: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Wraps the cast of results so that the type of each is noted; values and shapes are unchanged."""

        def left(tensor: torch.Tensor) -> torch.Tensor:
            copy = leave(tensor)
            if copy.dtype != tensor.dtype and not self.is_trained:
                self._dtypes[copy] = tensor.dtype
            return copy

        return left

    def holds_any(self, arguments: Any) -> bool:
        """Returns whether nested arguments contain such a result."""
        return bool(self._dtypes) and any(
            isinstance(each, torch.Tensor) and each in self._dtypes for each in pytree.tree_leaves(arguments)
        )

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an argument in the type in which the model returned it, as autocast alone would pass it."""
        return tensor.to(self._dtypes[tensor]) if tensor in self._dtypes else tensor
