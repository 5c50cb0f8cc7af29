"""Distinguishes calls of modules under construction from calls of models."""

from __future__ import annotations

import sys

import torch


def is_within_constructor() -> bool:
    """Whether a module's ``__init__`` is running on this thread.

    Constructors call modules to infer sizes, and parametrizations (weight and spectral norm) to find their originals:
    the enclosing model does not exist yet, and nothing is trained.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), torch.nn.Module):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
