"""Workspaces and temporary memory of libraries, large operators, reductions and masks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from memprof.machines.card import architecture_of, find_card
from memprof.machines.outside import work_area_interval
from memprof.recorder.profiler.native import NativeEvents
from memprof.replay.allocator.rules import Settings
from memprof.virtual.device.kernels.cuda_kernels import DeviceKernels
from memprof.virtual.device.kernels.reductions import reduction_sizes
from memprof.virtual.device.memory import VirtualMemory
from memprof.virtual.sizes import kernel_probe, workspace_law
from tests.recorder.recorded import record_both

_aten = torch.ops.aten


_MIB = 1 << 20


def _temporary_bytes(func, *args) -> int:
    """Returns the most that an operator's temporary blocks take at once."""
    architecture = architecture_of("8.9")
    assert architecture is not None
    memory = VirtualMemory(Settings())
    kernels, result = DeviceKernels(architecture, memory, 128), func(*args)
    steps = kernels.steps(func, args, result)
    if steps is None:
        kernels.run(func, args, result)
    else:
        memory.follow(steps, lambda _place: None)
    return int(memory.stats()["requested_bytes"]["all"]["peak"])


@pytest.mark.parametrize(
    ("func", "tensor", "more", "size"),
    [
        # 512 x 512 complex64, alone and 32 at a time: 2 and 64 MiB, as measured in CUDA.jl's issue 894.
        (_aten._fft_c2c.default, torch.empty(512, 512, dtype=torch.complex64, device="meta"), (0, True), 2 * _MIB),
        (_aten._fft_c2c.default, torch.empty(32, 512, 512, dtype=torch.complex64, device="meta"), (0, True), 64 * _MIB),
        # The complex side of 1,024 real numbers: 513 of 8 B in each of 1,024 rows.
        (_aten._fft_r2c.default, torch.empty(1024, 1024, device="meta"), (0, True), 1024 * 513 * 8),
        # The same in the other direction, and a copy of the input: twice 1,024 x 513 x 8 B.
        (
            _aten._fft_c2r.default,
            torch.empty(1024, 513, dtype=torch.complex64, device="meta"),
            (0, 1024),
            2 * 1024 * 513 * 8,
        ),
    ],
    ids=["one", "batch", "real", "inverse real"],
)
def test_a_transform_takes_its_complex_side_once(func, tensor, more, size) -> None:
    """The least that cuFFT documents; torch allocates it for each call and frees it after."""
    dims = [1] if func is not _aten._fft_c2c.default else [-2, -1]
    assert _temporary_bytes(func, tensor, dims, *more) == size


def test_a_transform_may_take_eight_times_as_much() -> None:
    """The most that cuFFT documents, less what was counted; what was counted is the least."""
    assert work_area_interval(2 * _MIB, 2 * _MIB) == (0, 14 * _MIB)
    assert work_area_interval(0, 0) == (0, 0)


@pytest.mark.parametrize(
    ("dtype", "channels"), [(torch.float32, (3, 64)), (torch.bfloat16, (8, 64))], ids=["fp32", "bf16"]
)
def test_copies_for_tensor_cores_have_padded_channels(dtype, channels) -> None:
    """ResNet-50 begins with 244,093,712 bytes in fp32 on an H200, and 154,190,864 in bf16, where 3 become 8."""
    tensor = torch.empty(64, 3, 224, 224, dtype=dtype, device="meta")
    weight = torch.empty(64, 3, 7, 7, dtype=dtype, device="meta")
    arguments = (tensor, weight, None, [2, 2], [3, 3], [1, 1], False, [0, 0], 1)
    read, made = channels
    copies = (64 * read * 224**2 + 64 * read * 7**2 + 64 * made * 112**2) * dtype.itemsize
    assert copies + 16 == {torch.float32: 244_093_712, torch.bfloat16: 154_190_864}[dtype]
    assert _temporary_bytes(_aten.convolution.default, *arguments) == pytest.approx(copies, abs=512)


@pytest.mark.parametrize(
    ("shape", "weight", "taken"),
    [
        # ResNet-50's 256 to 64 channels, 64 images, and DeepLab's 512 to 2,048, four: partial gradients of each image.
        ((64, 256, 56, 56), (64, 256, 1, 1), 4_194_704),
        ((4, 512, 48, 48), (2048, 512, 1, 1), 16_777_616),
        # ResNet-50's 512 to 2,048 at the end: copies of input and gradient take less.
        ((64, 512, 7, 7), (2048, 512, 1, 1), 32_112_656),
    ],
)
def test_a_product_s_weight_has_a_partial_gradient_of_each_sample(shape, weight, taken) -> None:
    """Unless copies in another order take less."""
    tensor, kernel = torch.empty(shape, device="meta"), torch.empty(weight, device="meta")
    settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    gradient = _aten.convolution.default(tensor, kernel, None, *settings)
    arguments = (gradient, tensor, kernel, None, *settings, [False, True, False])
    assert _temporary_bytes(_aten.convolution_backward.default, *arguments) == pytest.approx(taken, abs=512)


_PLAIN = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


_IMAGES, _MADE, _KERNEL = (96, 16, 28, 28), (96, 32, 28, 28), (32, 16, 3, 3)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _short(*shape: int) -> torch.Tensor:
    return _empty(*shape, dtype=torch.bfloat16)


CASES = {
    "convolution": (_aten.convolution.default, (_empty(*_IMAGES), _empty(*_KERNEL), None, *_PLAIN)),
    "convolution in bf16": (_aten.convolution.default, (_short(*_IMAGES), _short(*_KERNEL), None, *_PLAIN)),
    "its backward in bf16": (
        _aten.convolution_backward.default,
        (_short(*_MADE), _short(*_IMAGES), _short(*_KERNEL), [32], *_PLAIN, [True, True, True]),
    ),
    "groups": (
        _aten.native_group_norm.default,
        (_short(*_IMAGES), _short(16), _short(16), 96, 16, 784, 4, 1e-5),
    ),
    "a sum": (_aten.sum.dim_IntList, (_empty(4096, 256, dtype=torch.int32), [0])),
    "two types": (_aten.mul.Tensor, (_short(512, 512, 4), _empty(512, 4))),
    "an expanded matrix": (_aten.mm.default, (_empty(1, 1).expand(4096, 256), _empty(256, 512))),
    "both sides expanded": (_aten.mm.default, (_empty(1, 1).expand(2048, 1024), _empty(1, 1).expand(1024, 2048))),
}


@pytest.mark.parametrize("name", CASES)
def test_a_smaller_batch_tells_what_a_larger_one_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, with the shapes, strides and types of the results: libraries choose them, no table of ours."""
    monkeypatch.setattr(workspace_law, "_MOST_BYTES", 2**21)
    NativeEvents.initialize()
    func, args = CASES[name]
    whole = kernel_probe._try(func, args, {})
    assert whole is not None
    results = [_empty(*shape[0]) for shape in whole[1]]
    assert workspace_law.extrapolate(func, args, {}, results, kernel_probe._try) == whole


def test_what_smaller_batches_do_not_tell_is_measured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of one cannot be smaller: the running sum of 2**18 numbers casts them to int64, 2 MiB."""
    monkeypatch.setattr(kernel_probe, "_MOST_BYTES", 2**18)
    NativeEvents.initialize()
    numbers, sums = torch.empty(1, 2**18, dtype=torch.int32), torch.empty(1, 2**18, dtype=torch.int64)
    func, args = _aten.cumsum.default, (numbers, 1)
    assert workspace_law.extrapolate(func, args, {}, [sums], kernel_probe._try) is None
    assert kernel_probe.Kernels().learn(func, args, {}, sums, torch.empty_strided) == (sums, 2**18 * 8)


def test_workspaces_that_grow_by_squares_are_not_guessed() -> None:
    """Three batches of 1, 2 and 4 times the size take 1, 4 and 16: on no line."""

    def squares(_func: object, args: list[torch.Tensor], _kwargs: object) -> tuple[int, list[object]]:
        return len(args[0]) ** 2, []

    assert workspace_law.extrapolate(_aten.mse_loss.default, (_empty(2**20), _empty(2**20)), {}, [], squares) is None


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


_MASKED = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(64, 200)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
apart = ~torch.eye(200, dtype=torch.bool)

for _ in range(4):
    optimizer.zero_grad()
    out = net(torch.randn(32, 64))
    products = out.T @ out
    loss = SELECTED.pow(2).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "selected",
    [
        "products[apart]",
        "products.masked_select(apart)",
        "products[apart[0]]",
        "products[:, torch.arange(150, dtype=torch.int32)]",
        "products.index_put((apart,), products.detach()[apart], accumulate=True)",
        "products.index_put((apart,), torch.zeros(()))",
    ],
)
def test_positions_of_a_mask_are_counted(tmp_path: Path, selected: str) -> None:
    """Kernels first find the positions of the elements that are true, in two dimensions four times a result's bytes."""
    real, dry = record_both(tmp_path, _MASKED.replace("SELECTED", selected))
    assert dry.peak == real.peak
