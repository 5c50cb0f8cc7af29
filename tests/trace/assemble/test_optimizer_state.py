"""The state size of torch's optimizers, predicted to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from memprof.recorder.memory.failures import describe_optimizer
from memprof.trace.assemble.process import FORMULAS, full_state_bytes

#: A matrix, an image kernel, a vector, a scalar, an empty one, and one whose rows do not lie one after the other.
SHAPES = ((7, 5), (3, 2, 5, 1), (11,), (), (0, 4), (1, 1))
MATRICES = ((7, 5), (1, 9), (64, 3))

CASES: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": False}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    (torch.optim.RMSprop, {}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.RMSprop, {"centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
]


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The type that torch gives to what has none, and to steps that are counted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def parameters(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.full(shape, 0.5, dtype=dtype)) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.ones_like(parameter)
    return made


def check(optimizer: torch.optim.Optimizer) -> None:
    """Asks ahead, updates, and compares."""
    before = describe_optimizer(optimizer, 0, 0)
    told = full_state_bytes(before["algorithm"], before["groups"], before["scalar_bytes"])
    optimizer.step()
    after = describe_optimizer(optimizer, 0, 1)
    assert told == after["state_bytes"]


@pytest.mark.parametrize(("kind", "settings"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_state_is_told_to_the_byte(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], dtype: torch.dtype, default_dtype: torch.dtype
) -> None:
    """Of every class, every setting that changes it, odd shapes and types: equal to what a real update makes."""
    check(kind(parameters(SHAPES, dtype), lr=1e-3, **settings))  # type: ignore[call-arg]


def test_those_that_take_special_parameters() -> None:
    """Adafactor takes none that is empty, Muon matrices only, and SparseAdam gradients of few rows."""
    check(torch.optim.Adafactor(parameters(tuple(shape for shape in SHAPES if 0 not in shape), torch.float32)))
    check(torch.optim.Muon(parameters(MATRICES, torch.float32)))
    table = torch.nn.Parameter(torch.zeros(10, 3))
    table.grad = torch.sparse_coo_tensor([[1, 4]], torch.ones(2, 3), (10, 3))
    check(torch.optim.SparseAdam([table]))


def test_groups_have_settings_of_their_own() -> None:
    """Each group counts by its own settings, and parameters that are not trained count nothing."""
    first, second, frozen = parameters(((4, 4), (6,), (5,)), torch.float32)
    frozen.requires_grad_(requires_grad=False)
    frozen.grad = None
    groups = [{"params": [first, frozen], "momentum": 0.9}, {"params": [second], "momentum": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    before = describe_optimizer(optimizer, 0, 0)
    assert full_state_bytes(before["algorithm"], before["groups"], before["scalar_bytes"]) == 4 * 4 * 4
    check(optimizer)


def test_subclass_that_updates_as_its_parent() -> None:
    """A class of the job's own counts as the class whose update it runs; one with an update of its own is unknown."""

    class Mine(torch.optim.AdamW):
        pass

    class Other(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            """Does something else."""

    check(Mine(parameters(SHAPES, torch.float32)))
    other = describe_optimizer(Other(parameters(SHAPES, torch.float32), lr=0.1), 0, 0)
    assert full_state_bytes(other["algorithm"], other["groups"], other["scalar_bytes"]) is None


def test_history_has_no_fixed_size() -> None:
    """LBFGS keeps a history that grows: its size is reported as unknown."""
    record = describe_optimizer(torch.optim.LBFGS(parameters(SHAPES, torch.float32)), 0, 0)
    assert record["algorithm"] == "torch.optim.lbfgs.LBFGS"
    assert full_state_bytes(record["algorithm"], record["groups"], record["scalar_bytes"]) is None


def test_every_optimizer_of_torch_is_known() -> None:
    """A class that a new torch adds fails here until its formula is written down."""
    own = {
        f"{kind.step.__module__}.{kind.step.__qualname__.rpartition('.')[0]}"
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }
    assert own - FORMULAS.keys() == {"torch.optim.lbfgs.LBFGS"}
