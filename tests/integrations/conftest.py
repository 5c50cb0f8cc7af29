"""Trainings with third-party libraries on small random models, in this process."""

from __future__ import annotations

import gc

import pytest

from tests.recorder.conftest import one_thread

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def without_garbage() -> None:
    """Optimizers of trainings before must not be waited for."""
    gc.collect()
