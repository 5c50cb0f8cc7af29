"""Trainings with third-party libraries on small random models, in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Keeps torch to one thread: sums are added in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def without_garbage() -> None:
    """Optimizers of trainings before must not be waited for."""
    gc.collect()
