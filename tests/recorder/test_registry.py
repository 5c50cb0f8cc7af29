"""Modules and parameters by number and name."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from memprof.launch.apply import parameter_bytes
from memprof.recorder.calls.module_registry import ModuleRegistry
from memprof.recorder.memory.live_objects import live_objects
from tests.recorder.conftest import Logged


def record_of(log: Logged, number: int) -> list[Any]:
    """Returns [root, name, type, parent, bytes of own parameters] of a module, as written."""
    return log.texts("modules")[number]


def test_a_module_is_found_below_its_model(log: Logged) -> None:
    """Its name is the path below the outermost module, wherever in it the first call is made."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 4, bias=False)))
    registry = ModuleRegistry(log)
    inner = registry.number(model[1][1])
    root, name, kind, parent, own_bytes = record_of(log, inner)
    assert (name, kind, own_bytes) == ("1.1", "Linear", 48)
    assert record_of(log, parent) == [root, "1", "Sequential", registry.number(model), 0]
    assert record_of(log, registry.number(model[0]))[4] == (6 + 3) * 4


def test_numbers_stay(log: Logged) -> None:
    """However often a module is asked for; each module has its own."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    registry = ModuleRegistry(log)
    numbers = [registry.number(module) for module in model.modules()]
    assert numbers == [registry.number(module) for module in model.modules()]
    assert len(set(numbers)) == 3


def test_a_shared_module_has_its_first_name(log: Logged) -> None:
    """As in named_modules(), a module in two places is listed once."""
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"encoder": shared, "decoder": shared})
    registry = ModuleRegistry(log)
    registry.number(model)
    assert record_of(log, registry.number(shared))[1] == "encoder"


def test_modules_of_two_models_are_named_after_the_one_that_holds_most(log: Logged) -> None:
    """A model takes over the layers of another that the job keeps but no longer calls."""
    before = nn.Sequential(nn.Linear(2, 2))
    taken = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.ModuleDict({"backbone": nn.Sequential(*taken), "head": nn.Linear(2, 2)})
    registry = ModuleRegistry(log)
    registry.scan()
    for place, name in enumerate(("backbone.0", "backbone.1")):
        root, found, _, _, _ = record_of(log, registry.number(taken[place]))
        assert (root, found) == (registry.root_number(model), name)
    assert registry.parameter(taken[0].weight)[0] == "backbone.0.weight"
    assert record_of(log, registry.number(taken))[4] == 0
    roots = [registry.root_number(each) for each in (before, taken, model)]
    assert -1 not in roots


def test_models_that_share_nothing_are_numbered_as_they_were_made(log: Logged) -> None:
    """However large each is."""
    models = [nn.Sequential(*(nn.Linear(2, 2) for _ in range(count))) for count in (1, 3, 2)]
    registry = ModuleRegistry(log)
    registry.scan()
    numbers = [registry.root_number(model) for model in models]
    assert numbers == sorted(numbers)


def test_a_module_added_later_is_met(log: Logged) -> None:
    """What is put on a model that was known already, with parameters or without, belongs to that model."""
    model = nn.Sequential(nn.Linear(2, 2))
    registry = ModuleRegistry(log)
    number = registry.number(model)
    model.append(nn.ReLU())
    model.append(nn.Linear(2, 3))
    for place in (1, 2):
        root, name, _, parent, _ = record_of(log, registry.number(model[place]))
        assert (root, name, parent) == (record_of(log, number)[0], str(place), number)
    assert registry.parameter(model[2].weight) == ("2.weight", registry.number(model[2]))


def test_a_module_put_in_anothers_place_is_a_new_one(log: Logged) -> None:
    """Under the same name, and perhaps with the same id in Python."""
    model = nn.Sequential(nn.ReLU())
    registry = ModuleRegistry(log)
    registry.scan()
    kinds = []
    for kind in (nn.ReLU, nn.Tanh, nn.Sigmoid):
        model[0] = kind()
        gc.collect(0)
        kinds.append(record_of(log, registry.number(model[0]))[1:3])
    assert kinds == [["0", "ReLU"], ["0", "Tanh"], ["0", "Sigmoid"]]


def test_a_module_made_for_one_call_is_met_quickly(log: Logged, monkeypatch: pytest.MonkeyPatch) -> None:
    """nn.Softmax(1)(x) in a forward makes a module a call: the process is not searched for the model it belongs to."""
    registry = ModuleRegistry(log)
    monkeypatch.setattr(registry, "scan", lambda: pytest.fail("searched the whole process"))
    kept = [nn.Softmax(1) for _ in range(3)]
    assert [record_of(log, registry.number(module))[2] for module in kept] == ["Softmax"] * 3


def test_modules_that_hold_something_are_counted(log: Logged) -> None:
    """So that what a new model holds is stated when it is met: here a Linear and a BatchNorm, not their container."""
    registry = ModuleRegistry(log)
    registry.scan()
    before = registry.holders
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2, affine=False))
    registry.number(model)
    assert registry.holders == before + 2


def test_a_module_in_a_dead_modules_place_is_a_new_one(log: Logged) -> None:
    """Python gives a dead object's id to the next: it must not inherit the name."""
    registry = ModuleRegistry(log)
    seen = set()
    for _ in range(20):
        module = nn.ReLU()
        seen.add(registry.number(module))
        del module
        gc.collect(0)
    assert len(seen) == 20


def test_parameters_are_known_by_their_qualified_name(log: Logged) -> None:
    """With the module that holds them; tied ones by their last name; what no model holds has none."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    registry = ModuleRegistry(log)
    registry.scan()
    assert registry.parameter(model[1].bias) == ("1.bias", registry.number(model[1]))
    assert registry.parameter(nn.Parameter(torch.zeros(1))) == ("", -1)
    assert registry.parameter(torch.zeros(1)) == ("", -1)


def test_lazy_parameters_are_met_without_being_made(log: Logged) -> None:
    """A lazy module has no sizes before its first call, and the recorder does not ask."""
    model = nn.Sequential(nn.LazyLinear(4))
    registry = ModuleRegistry(log)
    assert record_of(log, registry.number(model[0]))[4] == 0
    assert isinstance(model[0].weight, nn.UninitializedParameter)


def test_models_are_listed_while_they_live(log: Logged) -> None:
    """The roots only, and the recorder keeps none of them alive."""
    model = nn.Sequential(nn.Linear(2, 2))
    registry = ModuleRegistry(log)
    registry.number(model[0])
    assert any(root is model for root in registry.roots())
    assert not any(root is model[0] for root in registry.roots())
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_a_module_under_construction_is_no_model(log: Logged) -> None:
    """An object whose __init__ has not reached nn.Module's yet has no parts to list."""
    unfinished = nn.Linear.__new__(nn.Linear)
    registry = ModuleRegistry(log)
    registry.scan()
    assert all(root is not unfinished for root in registry.roots())


def test_proxies_are_not_touched() -> None:
    """Lazy objects answer __class__ by loading what they stand for; listing what is alive must not ask."""

    class Proxy:
        @property
        def __class__(self) -> type:
            raise AssertionError("the proxy was asked what it is")

    proxy = Proxy()
    assert gc.is_tracked(proxy)
    assert all(thing is not proxy for thing in live_objects(nn.Module))


def test_looking_for_objects_leaves_a_tuple_in_the_making_alone() -> None:
    """Python raises a SystemError for a tuple filled from a generator while it has another reference."""
    model = nn.Linear(1, 1)

    def numbers() -> Iterator[int]:
        yield 0
        assert any(thing is model for thing in live_objects(nn.Module))
        yield from range(1, 40)

    assert tuple(numbers()) == tuple(range(40))


@pytest.mark.parametrize("collected", [(), (0,), (1,), (0, 1), (0, 1, 2)])
def test_equal_models_are_listed_in_the_order_of_their_creation(collected: tuple[int, ...]) -> None:
    """Whenever the garbage collector runs: their names, Net and Net#2, follow this order."""
    gc.collect()
    gc.disable()
    try:
        made = []
        for number in range(3):
            made.append(nn.Bilinear(2, 2, 2))
            if number in collected:
                gc.collect(number)
        assert [id(each) for each in live_objects(nn.Bilinear)] == [id(each) for each in made]
    finally:
        gc.enable()


def test_a_parameters_bytes_are_those_of_the_tensors_that_hold_it(log: Logged) -> None:
    """Of 2 x 2 values on a diagonal: 4-byte values and 8-byte indices by layout, one of 8 bits, none uninitialized.

    COO has 2 values and 2 x 2 indices: 40 B; CSR and CSC 3 + 2: 48 B; blocks of one value the same.
    """
    dense = torch.eye(2)
    kinds: dict[str, tuple[torch.Tensor, int]] = {
        "coo": (dense.to_sparse(), 40),
        "csr": (dense.to_sparse_csr(), 48),
        "csc": (dense.to_sparse_csc(), 48),
        "bsr": (dense.to_sparse_bsr((1, 1)), 48),
        "bsc": (dense.to_sparse_bsc((1, 1)), 48),
        "jagged": (torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)], layout=torch.jagged), 24 + 24),
        "opaque": (dense.to_mkldnn(), 16),
        "quantized": (torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8), 4),
        "meta": (torch.empty(2, device="meta"), 8),
        "complex": (dense.to(torch.complex64), 32),
        "empty": (torch.empty(0, 2), 0),
    }
    module = nn.Module()
    for name, (tensor, _) in kinds.items():
        module.add_module(name, nn.Module())
        module.get_submodule(name).p = nn.Parameter(tensor, requires_grad=False)
    module.add_module("lazy", nn.LazyLinear(2))
    registry = ModuleRegistry(log)
    registry.scan()
    found = {name: record_of(log, registry.number(child))[4] for name, child in module.named_children()}
    assert found == {"lazy": 0, **{name: size for name, (_, size) in kinds.items()}}
    assert registry.resized() == []
    assert parameter_bytes(module) == sum(found.values())


def test_a_search_leaves_nothing_behind_that_keeps_objects() -> None:
    gc.collect()
    gc.disable()
    try:
        live_objects(torch.Tensor)
        assert gc.collect() == 0  # no cycle, which would hold whatever it has found until a collection
    finally:
        gc.enable()
