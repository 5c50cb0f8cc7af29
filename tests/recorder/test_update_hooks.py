"""Hooks on every optimizer's updates come and go while torch calls them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from memprof.recorder.steps.update_hooks import UpdateHooks


@pytest.fixture(autouse=True)
def hooks_left() -> Iterator[None]:
    yield
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks


def updated(count: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    for _ in range(count):
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("where", ["before", "after"])
def test_hooks_remove_themselves_in_front_of_others(where: str) -> None:
    """A job whose own hooks were registered later goes on: the next update takes ours out of the tables."""
    called: list[str] = []

    def end(kind: str) -> None:
        called.append(kind)
        if kind == where:
            hooks.remove()

    hooks = UpdateHooks(lambda *_: end("before"), lambda *_: end("after"))
    hooks.install()
    own = [
        torch_optimizer.register_optimizer_step_pre_hook(lambda *_: called.append("own")),
        torch_optimizer.register_optimizer_step_post_hook(lambda *_: called.append("own")),
    ]
    optimizer = updated(3)
    assert called.count(where) == 1
    assert called.count("own") == 6
    assert len(torch_optimizer._global_optimizer_pre_hooks) == 1
    assert len(torch_optimizer._global_optimizer_post_hooks) == 1
    assert not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]  # torch's own table
    for handle in own:
        handle.remove()


def test_last_hook_may_change_the_tables_at_once() -> None:
    """Behind all others it is the last to be called; where others come later, it moves behind them."""
    seen: list[bool] = []
    hooks = UpdateHooks(None, lambda *_: seen.append(hooks.is_last()))
    hooks.install()
    optimizer = updated(1)
    own = torch_optimizer.register_optimizer_step_post_hook(lambda *_: None)
    optimizer.step()
    optimizer.step()
    assert seen == [True, False, True]
    own.remove()
    hooks.remove()
    hooks.remove()
    assert not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]  # torch's own table
