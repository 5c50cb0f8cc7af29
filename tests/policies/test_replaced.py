"""Functions wrapped by several plans, unwrapped in every order."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad

from memprof.policies.runtime.replaced import cell_of_body, replace, replace_method


def _adding(letter: str) -> Callable[[Any], Any]:
    return lambda before: lambda text: letter + before(text)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_each_layer_goes_by_itself(order: Sequence[int]) -> None:
    """The layers that are left run, from the last to the first, and the owner's own function is there in the end."""
    module = types.ModuleType("torch_for_the_test")
    own: Any = lambda text: text  # noqa: E731
    module.say = own  # type: ignore[attr-defined]
    undo = [replace(module, "say", _adding(letter)) for letter in "abc"]
    left = ["a", "b", "c"]
    assert module.say("") == "cba"
    for number in order:
        undo[number]()
        left.remove("abc"[number])
        assert module.say("") == "".join(reversed(left))
    assert vars(module)["say"] is own


def test_an_inherited_method_is_inherited_again() -> None:
    """A class that has no function of its own has none afterwards."""

    class Child(torch.nn.Linear):
        pass

    undo = replace(Child, "extra_repr", lambda before: lambda module: "layer " + before(module))
    own = torch.nn.Linear(2, 3).extra_repr()
    assert Child(2, 3).extra_repr() == "layer " + own
    undo()
    assert "extra_repr" not in vars(Child)
    assert Child(2, 3).extra_repr() == own


def test_a_layer_of_another_library_stays() -> None:
    """What was put around ours since goes on running, without ours once that is taken away, and is not written over."""
    module = types.ModuleType("torch_for_the_test")
    module.say = lambda text: text  # type: ignore[attr-defined]
    inner = replace(module, "say", _adding("a"))
    ours = module.say
    module.say = lambda text: "other " + ours(text)  # type: ignore[attr-defined]
    vars(module)["say"].__dict__.update(vars(ours))  # as functools.wraps does
    outer = replace(module, "say", _adding("b"))
    assert module.say("") == "bother a"
    inner()
    assert module.say("") == "bother "
    outer()
    assert module.say("") == "other "


def test_the_body_of_clipping_is_replaced_for_those_who_imported_it() -> None:
    """One who holds the function by another name runs the layer, too."""
    held = clip_grad.clip_grad_value_
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.full((2,), 4.0)
    undo = replace(cell_of_body(held), "cell_contents", lambda before: lambda given, value: before(given, value * 2))
    held([weight], 1.0)
    assert weight.grad.tolist() == [2.0, 2.0]
    undo()
    held([weight], 1.0)
    assert weight.grad.tolist() == [1.0, 1.0]


def test_a_method_of_one_object_is_replaced_while_others_wrap_it() -> None:
    """An LR scheduler put around it since stays and reaches torch's own step; without one, the object is as before."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, other = torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([weight], lr=0.1)
    seen: list[str] = []
    own = other.step
    undo_other = replace_method(other, "step", lambda: seen.append("other"))
    undo = replace_method(optimizer, "step", lambda: seen.append("step"))
    other.step()
    undo_other()
    assert "step" not in vars(other)
    assert other.step == own
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    assert seen == ["other", "step"]
    undo()
    weight.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()
    assert weight.item() == pytest.approx(0.9)
    assert seen == ["other", "step"]
