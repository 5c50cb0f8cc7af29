"""Tells calls of modules that are still being made from calls of models."""

from __future__ import annotations

import sys

import torch


def is_within_constructor() -> bool:
    """Whether some module's ``__init__`` is under way on this thread.

    Constructors call modules to learn sizes, and parametrizations (weight and spectral norm) to find their originals:
    the model around them is not there yet, and nothing is trained.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
