"""The table of facts about operators, compared with the installed torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from memprof.trace import operator_facts as facts

_SETS = {name: value for name, value in vars(facts).items() if isinstance(value, frozenset)}
#: Of backends that a build of torch may be without.
_OF_BACKENDS = ("mkldnn", "cudnn", "miopen", "mps")


@pytest.mark.parametrize("name", sorted(_SETS))
def test_every_operator_of_a_fact_exists(name: str) -> None:
    """An operator that torch does not have is a mistake, or was renamed."""
    missing = {
        each
        for each in _SETS[name]
        if not _find(each) and not any(part in each for part in _OF_BACKENDS) and not each.startswith("__")
    }
    assert not missing


@pytest.mark.parametrize("kind", facts.OPERATOR_KINDS)
def test_every_kept_operator_exists(kind: str) -> None:
    """They are named as a recording and torch's dispatcher name them."""
    for name in facts.OPERATOR_KINDS[kind]:
        space, operator, overload = name.split(".")
        assert (space, overload) == ("aten", "default")
        assert _find(operator) or any(part in name for part in _OF_BACKENDS)


def test_draws_are_those_that_torch_marks_as_random() -> None:
    """Each has an overload with torch's tag."""
    for name in facts.DRAWS:
        packet = getattr(torch.ops.aten, name)
        tags = [getattr(packet, overload).tags for overload in packet.overloads()]
        assert any(torch.Tag.nondeterministic_seeded in each for each in tags), name


def test_a_view_returns_its_argument_and_writes_to_none() -> None:
    """By torch's schemas: a view, a new tensor, a change in place, and an operator that returns nothing."""
    aten: Any = torch.ops.aten
    assert facts.is_view(aten.view.default._schema)
    assert facts.is_view(aten.unbind.int._schema)
    assert not facts.is_view(aten.mm.default._schema)
    assert not facts.is_view(aten.add_.Tensor._schema)
    assert not facts.is_view(aten._foreach_zero_.default._schema)
    assert not facts.is_view(None)
    assert [place for place, _ in facts.written_arguments(aten.add_.Tensor._schema)] == [0]


def test_a_name_with_an_overload_means_it_alone() -> None:
    """``mm`` is any overload, ``add.Tensor`` one; other namespaces have operators of their own."""
    names = np.array(["aten.mm.default", "aten.add.Tensor", "aten.add.Scalar", "mylib.mm.default", "aten::mm"])
    assert facts.are_among(names, {"mm", "add.Tensor"}).tolist() == [True, True, False, False, True]
    assert facts.have_word(names, ("add",)).tolist() == [False, True, True, False, False]
    assert facts.short_name("aten.mm.default") == "mm"


def _find(name: str) -> bool:
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return found is not None and (not overload or overload in found.overloads())
