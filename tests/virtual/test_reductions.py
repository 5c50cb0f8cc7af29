"""Temporary memory of reductions on GPUs: what real snapshots hold, and the cases of torch's rule."""

from __future__ import annotations

import pytest
import torch

from memprof.machines.card import find_card
from memprof.virtual.device.kernels.reductions import reduction_sizes

_aten = torch.ops.aten


def sizes(shape: tuple[int, ...], dims: list[int], card: str, operator: str = "sum") -> list[int]:
    """Returns the temporary memory of a reduction on a card."""
    tensor = torch.empty(shape, device="meta")
    result = tensor.sum(dims) if dims else tensor.sum()
    machine = find_card(card)
    return reduction_sizes(
        getattr(_aten, operator),
        (tensor, dims),
        (result, result) if operator == "max" else result,
        machine.machine.multiprocessors,
        machine.architecture.threads,
    )


@pytest.mark.parametrize(
    ("shape", "card", "operator", "buffer"),
    [
        ((8192, 768), "rtx4090", "sum", 50_331_648),
        ((2048, 2560), "h100-80g", "sum", 41_943_040),
        ((10_000, 512), "h100-80g", "sum", 41_156_608),
        ((10_000, 512), "h100-80g", "max", 164_626_432),
        ((10_000, 2048), "h100-80g", "sum", 138_412_032),
    ],
)
def test_what_real_gpus_allocated(shape: tuple[int, ...], card: str, operator: str, buffer: int) -> None:
    """Sizes in memory snapshots of public training scripts (docs/virtual-gpu.md)."""
    assert sizes(shape, [0], card, operator)[0] == buffer


def test_small_reductions_take_nothing() -> None:
    """One block adds up 512 rows; so it does the values of a row, and a tensor that is not reduced."""
    assert sizes((512, 768), [0], "rtx4090") == []
    assert sizes((8192, 64), [1], "rtx4090") == []
    assert sizes((8192, 1), [1], "rtx4090") == []


def test_the_number_of_multiprocessors_counts() -> None:
    """A small card divides a reduction among fewer blocks than a large one."""
    small, large = (sizes((2**20, 4), [0], card)[0] for card in ("t4", "h100-80g"))
    assert 0 < small < large


def test_dimensions_that_lie_one_after_the_other_are_one() -> None:
    """A batch of sequences is reduced like the rows of a matrix, a sum over everything like a row."""
    assert sizes((32, 256, 768), [0, 1], "rtx4090") == sizes((8192, 768), [0], "rtx4090")
    assert sizes((1024, 1024), [], "rtx4090") == sizes((2**20,), [0], "rtx4090")
    assert sizes((2**20,), [0], "rtx4090")


@pytest.mark.parametrize("order", [1, 2, 2.0])
@pytest.mark.parametrize(("shape", "dims"), [((8, 3, 9216), [0, 2]), ((8192, 768), [0]), ((8192, 64), [1])])
def test_the_order_of_a_norm_is_no_dimension(shape: tuple[int, ...], dims: list[int], order: float) -> None:
    """Norms over dimensions are reduced as sums over them are; over everything where none is named."""
    tensor = torch.empty(shape, device="meta")
    machine = find_card("rtx4090")
    processors, threads = machine.machine.multiprocessors, machine.architecture.threads
    result = tensor.sum(dims)
    for operator in (_aten.linalg_vector_norm, _aten.norm):
        found = reduction_sizes(operator, (tensor, order, dims), result, processors, threads)
        assert found == sizes(shape, dims, "rtx4090")
        whole = reduction_sizes(operator, (tensor, order), tensor.sum(), processors, threads)
        assert whole == sizes(shape, [], "rtx4090") != []
