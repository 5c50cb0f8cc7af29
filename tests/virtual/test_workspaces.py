"""Workspaces that libraries choose on a card: estimates by the rules that are public, and what is beyond them."""

from __future__ import annotations

import pytest
import torch

from memprof.machines.card import architecture_of
from memprof.machines.outside import work_area_interval
from memprof.replay.allocator.rules import Settings
from memprof.virtual.device.kernels.cuda_kernels import DeviceKernels
from memprof.virtual.device.memory import VirtualMemory

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
