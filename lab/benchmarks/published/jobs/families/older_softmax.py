"""Softmax as torch before 1.11 differentiates it: backward holds its input as well as its result.

pytorch/pytorch issue 64000; pull request 65242 changed it.
"""

from __future__ import annotations

from typing import Any

import torch


class _OlderSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, dim: int) -> torch.Tensor:
        probabilities = torch._softmax(scores, dim, False)
        ctx.save_for_backward(scores, probabilities)
        ctx.dim = dim
        return probabilities

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        scores, probabilities = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, probabilities, ctx.dim, scores.dtype), None


def older_softmax(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns the softmax over a dimension; in float32 under autocast, as torch's own."""
    if torch.is_autocast_enabled(scores.device.type):
        scores = scores.float()
    return _OlderSoftmax.apply(scores, dim)


def use_older_softmax() -> None:
    """Makes torch's own attention differentiate its softmax that way."""
    functional: Any = torch.nn.functional
    functional.softmax = older_softmax
