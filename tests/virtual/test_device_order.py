"""A dry run on a card allocates in the order of CUDA's kernels: sizes and orders are those of snapshots of an H200."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from memprof.machines.card import LT_WORKSPACE_BYTES, architecture_of
from memprof.replay.allocator.rules import Settings
from memprof.virtual.device.kernels.attention import Attention
from memprof.virtual.device.kernels.convolved import Convolutions
from memprof.virtual.device.kernels.cuda_kernels import DeviceKernels
from memprof.virtual.device.kernels.steps import steps_of
from memprof.virtual.device.memory import FREE, RESULTS, VirtualMemory, result_at
from tests.virtual.on_a_card import allocated

_aten = torch.ops.aten
_MIB = 1 << 20
_CUBLAS = 32 * _MIB

_LINEAR = """
x = torch.randn(512, 256, device="cuda")
layer = torch.nn.Linear(256, 1024).to("cuda")
START
with torch.autocast("cuda", dtype=torch.bfloat16):
    y = torch.nn.functional.dropout(layer(x), 0.1)
"""
_ATTENTION = """
q, k, v = (torch.randn(8, 12, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
START
torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
"""
_SYNCHRONIZED = """
x = torch.randn(4, 300, 16, 16, device="cuda", dtype=torch.float16)
w = torch.ones(300, device="cuda")
START
mean, scale = torch.batch_norm_stats(x, 1e-5)
y = torch.batch_norm_elemt(x, w, w, mean, scale, 1e-5)
sums = torch.batch_norm_backward_reduce(y, x, mean, scale, w, True, True, False)
assert sums[3] is None and sums[2].dtype is torch.float32
"""
_CAT = """
x = torch.zeros(0, device="cuda")
y = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
START
with torch.autocast("cuda", dtype=torch.bfloat16):
    torch.cat([x, y])
"""
_MASKED = """
q, k, v = (torch.randn(8, 8, 512, 64, device="cuda") for _ in range(3))
bias = torch.randn(8, 512, 512, 8, device="cuda").permute(0, 3, 1, 2)
START
torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
"""
_CLIPPED = """
w = [torch.zeros(70_000, device="cuda", requires_grad=True) for _ in range(3)]
for each in w:
    each.grad = torch.ones_like(each)
START
torch.nn.utils.clip_grad_norm_(w, 1.0)
"""


def test_autocast_casts_the_last_argument_first_and_dropout_makes_its_mask_first(tmp_path: Path) -> None:
    """Bias, weight and input of a linear layer, which its operator takes as input, weight and bias."""
    found = allocated(_LINEAR, tmp_path)
    casts, result = [1024 * 2, 1024 * 256 * 2, 512 * 256 * 2], 512 * 1024 * 2
    assert found[:4] == [*casts, result]
    assert found[-2:] == [result // 2, result]


def test_cudnn_attention_makes_its_seeds_first_and_has_one_workspace(tmp_path: Path) -> None:
    """Forward: seed, offset, result, sums, 256 bytes. Backward: the gradients, and 25,559,296 bytes once."""
    found = allocated(_ATTENTION, tmp_path)
    heads = 8 * 12 * 1024 * 64 * 2
    assert found[:5] == [512, 512, heads, 8 * 12 * 1024 * 4, 512]
    assert found[-4:] == [heads, heads, heads, 25_559_552]


def test_cat_promotes_under_autocast_without_copies(tmp_path: Path) -> None:
    """The result alone, in the wider type."""
    assert allocated(_CAT, tmp_path) == [4096]


def test_a_bias_whose_last_stride_is_not_one_is_added_by_the_composite(tmp_path: Path) -> None:
    """T5's self-attention: scaled queries and keys, scores and softmax, which rows are hidden, the result."""
    found = allocated(_MASKED, tmp_path)
    scores, heads = 8 * 8 * 512 * 512 * 4, 8 * 8 * 512 * 64 * 4
    assert [size for size in found if size >= heads and size != _CUBLAS].count(scores) == 2
    assert found[-4:] == [scores // 4, 8 * 8 * 512, 512, heads]


def test_clipping_takes_the_norms_of_all_gradients_at_once(tmp_path: Path) -> None:
    """A norm per tensor and one partial norm per tensor and chunk of 65,536 elements, not a norm after the other."""
    assert allocated(_CLIPPED, tmp_path)[:4] == [512] * 4


@pytest.mark.parametrize(("version", "kept"), [("2.11.0+cu130", _CUBLAS + LT_WORKSPACE_BYTES), ("2.12.0", _CUBLAS)])
def test_torch_before_2_12_keeps_a_workspace_of_cublaslt(
    version: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken with the first product that has a bias, and once."""
    monkeypatch.setattr(torch, "__version__", version)
    architecture = architecture_of("9.0")
    assert architecture is not None
    memory = VirtualMemory(Settings())
    kernels = DeviceKernels(architecture, memory, 132)
    left, right = torch.empty(4, 4, device="meta"), torch.empty(4, 8, device="meta")
    kernels.run(_aten.mm.default, (left, right), left @ right)
    assert memory.stats()["allocated_bytes"]["all"]["current"] == _CUBLAS
    arguments = (torch.empty(8, device="meta"), left, right)
    for _ in range(2):
        kernels.run(_aten.addmm.default, arguments, _aten.addmm.default(*arguments))
    assert memory.stats()["allocated_bytes"]["all"]["current"] == kept


@pytest.mark.parametrize(
    ("count", "rows", "width", "sort", "scans", "parts"),
    [
        (8_192, 50_257, 768, 150_015, (1_279, 1_279), [72_088, 27_681_792]),  # GPT-2
        (262_144, 32, 8, 4_269_567, (2_047, 1_279), [209_968, 209_968]),  # T5's relative positions
        (16_384, 32, 8, 283_135, (1_279, 1_279), [13_360, 13_360]),
        (8_192, 2, 768, 150_015, (1_279, 1_279), [6_568, 6_568]),  # BERT's token types
    ],
)
def test_indices_of_an_embedding_are_sorted_before_its_gradient_is_made(
    count: int, rows: int, width: int, sort: int, scans: tuple[int, int], parts: list[int]
) -> None:
    """The bytes that the kernel asked for on an H200, one by one."""
    gradient = torch.empty(count, width, device="meta")
    indices = torch.empty(count, dtype=torch.int64, device="meta")
    steps = steps_of(_aten.embedding_dense_backward.default, (gradient, indices, rows, -1, False), None)
    segments = min(count, rows)
    before = [8 * count] * 3
    assert steps == [
        *(*before, sort, FREE, FREE, RESULTS),
        *(8 * count, 8, 8 * count, scans[0], FREE, FREE, 8 * segments, 8 * segments, scans[1], FREE, 8),
        *parts,
    ]


def test_partial_norms_come_before_the_norms_of_many_tensors() -> None:
    """Each of 150 tensors has as many chunks of 65,536 elements as the largest."""
    tensors = [torch.empty(70_000, device="meta"), *[torch.empty(8, device="meta")] * 149]
    assert steps_of(_aten._foreach_norm.Scalar, (tensors, 2), None) == [150 * 2 * 4, RESULTS]


def test_a_layer_norm_copies_an_input_that_is_not_contiguous() -> None:
    """The copy is alive while the results are made."""
    tensor = torch.empty(4, 512, 1_500, device="meta")
    arguments = ([512], None, None, 1e-5)
    assert steps_of(_aten.native_layer_norm.default, (tensor.mT, *arguments), None) == [tensor.nbytes, RESULTS]
    assert steps_of(_aten.native_layer_norm.default, (tensor, *arguments), None) == [RESULTS]


@pytest.mark.parametrize(
    ("shape", "weight", "forward", "backward"),
    [
        # ResNet-50's 3 x 3 convolutions of 64 channels, 64 images of 56 x 56; and 1 x 1 of 2,048 to 512 in backward.
        ((64, 64, 56, 56), (64, 64, 3, 3), 102_907_904, 102_907_904),
        ((64, 2_048, 7, 7), (512, 2_048, 1, 1), 0, 32_112_640),
        # Whisper's and a network of volumes.
        ((4, 512, 3_000), (512, 512, 3), 52_297_728, 52_297_728),
        ((2, 16, 32, 48, 48), (32, 16, 3, 3, 3), 28_366_848, 28_366_848),
    ],
)
def test_a_convolution_copies_what_tensor_cores_need_in_another_order(
    shape: tuple[int, ...], weight: tuple[int, ...], forward: int, backward: int
) -> None:
    """The copies, and 256 bytes in place of the 16 to 400 that snapshots have."""
    tensor, kernel = torch.empty(shape, device="meta"), torch.empty(weight, device="meta")
    ranks = len(shape) - 2
    middle = weight[-1] // 2
    settings = ([1] * ranks, [middle] * ranks, [1] * ranks, False, [0] * ranks, 1)
    arguments = (tensor, kernel, None, *settings)
    result = _aten.convolution.default(*arguments)
    convolutions = Convolutions(None, has_tf32=True)
    steps = convolutions.steps_of(_aten.convolution.default, arguments, result)
    assert steps == [RESULTS, *([forward + 256] if forward else [])]
    arguments = (result, tensor, kernel, None, *settings, [True, True, False])
    steps = convolutions.steps_of(_aten.convolution_backward.default, arguments, None)
    workspace = [backward + 256, FREE]
    assert steps == [result_at(0), *(workspace if forward else []), result_at(1), *workspace]


def test_a_job_does_not_see_that_its_tensors_are_fake(tmp_path: Path) -> None:
    """transformers takes fake tensors for a graph that is traced, and keeps masks that a real run does not."""
    script = """
    x = torch.zeros(1024, device="cuda")
    START
    hidden = not isinstance(x, torch._subclasses.FakeTensor)
    y = torch.zeros(1024 if hidden else 4096, device="cuda") + 1
    """
    assert allocated(dedent(script), tmp_path) == [4096, 4096]


def test_efficient_attention_in_float32_multiplies_gradients_and_results() -> None:
    """Backward of T5's cross-attention: product, its sums twice, and blocks of gradients with a lock each."""
    architecture = architecture_of("9.0")
    assert architecture is not None
    memory = VirtualMemory(Settings())
    query, key = (torch.empty(8, 8, length, 64, device="meta") for length in (128, 512))
    arguments = (query, query, key, key, None, query)
    DeviceKernels(architecture, memory, 132).run(
        _aten._scaled_dot_product_efficient_attention_backward.default, arguments, None
    )
    assert memory.stats()["allocated_bytes"]["all"]["peak"] == 2_097_152 + 32_768 + 32_768 + 2_099_200


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "cudnn"),
        ({"mask": torch.empty(2, 64, 64, 4, device="meta", dtype=torch.bfloat16).permute(0, 3, 1, 2)}, "math"),
        ({"mask": torch.empty(4, 64, 64, device="meta", dtype=torch.bfloat16)}, "efficient"),
        ({"dtype": torch.float32}, "efficient"),
        ({"keys": 1}, "flash"),
        ({"mask": torch.empty(1, 1, 1, 64, device="meta", dtype=torch.bfloat16), "causal": True}, "cudnn"),
        ({"mask": torch.empty(1, 1, 1, 64, device="meta"), "dtype": torch.float32, "causal": True}, "efficient"),
    ],
    ids=["plain", "permuted mask", "mask of three dimensions", "float32", "one key", "causal mask", "causal float32"],
)
def test_hopper_chooses_the_first_kernel_that_supports_the_arguments(change: dict[str, Any], expected: str) -> None:
    """Conditions of sdp_utils.cpp of torch 2.11."""
    architecture = architecture_of("9.0")
    assert architecture is not None
    dtype = change.get("dtype", torch.bfloat16)
    query = torch.empty(2, 4, 64, 32, device="meta", dtype=dtype)
    key = torch.empty(2, 4, change.get("keys", 64), 32, device="meta", dtype=dtype)
    found = Attention(architecture)._choose(
        query, key, key, change.get("mask"), 0.0, is_causal=change.get("causal", False), shares_heads=False
    )
    assert found == expected


_RECURRENT = """
layer = torch.nn.LSTM(1500, 1500, 2, dropout=0.5, batch_first=True).to("cuda")
x = torch.randn(40, 35, 1500, device="cuda")
START
y, _ = layer(x)
assert not y.is_contiguous() and y.transpose(0, 1).is_contiguous()
"""


def test_a_recurrent_layer_keeps_what_cudnn_keeps(tmp_path: Path) -> None:
    """Random states once, an input with steps first, and a reserve of gates, cells, what dropout reads, and 256 B."""
    found = allocated(_RECURRENT, tmp_path)
    values = 40 * 35 * 1500 * 4
    assert found.count(132 * 2048 * 24) == 1
    assert found.count(-(-values // 512) * 512) == 2  # the copy of the input, and the output
    assert -(-(11 * values + 256) // 512) * 512 in found
    assert max(found) < 12 * values  # the weights are parts of a buffer that exists


_TYPED = """
x, y = (torch.randn(8, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
total = torch.zeros(8, 64, 64, device="cuda")
START
one = torch.addmm(total[0], x[0], y[0], out_dtype=torch.float32)
all_of_them = torch.baddbmm(total, x, y, out_dtype=torch.float32)
assert (one.dtype, all_of_them.dtype, all_of_them.shape) == (torch.float32, torch.float32, (8, 64, 64))
"""


def test_products_have_the_type_asked_for(tmp_path: Path) -> None:
    """Sums of products of bfloat16 in float32, for which torch's own shapes fail."""
    found = allocated(_TYPED, tmp_path)
    assert 64 * 64 * 4 in found
    assert 8 * 64 * 64 * 4 in found


def test_parts_of_synchronized_batch_norm_have_the_sizes_of_cudas_kernels(tmp_path: Path) -> None:
    """Statistics of 300 channels in fp32, for an input in fp16; of three wanted results one is the weight's gradient.

    By hand from torch's sources: torch's own rules for fake tensors have none of these operators.
    """
    assert allocated(_SYNCHRONIZED, tmp_path) == [1536, 1536, 4 * 300 * 16 * 16 * 2, 1536, 1536, 1536]
