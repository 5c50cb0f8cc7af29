"""Layers in 8 and in 4 bits on the card of a dry run; operators return as many columns as there are outliers.

`make test-libraries` trains with bitsandbytes itself; here operators of the same names and arguments stand for it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorder.recorded import record_script
from tests.virtual.on_a_card import allocated

_JOB = """
import torch
from torch import nn

NAMES = "bitsandbytes"
torch.library.define(f"{NAMES}::int8_vectorwise_quant", "(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor?)")
torch.library.define(
    f"{NAMES}::int8_mixed_scaled_mm",
    "(Tensor A, Tensor CA, Tensor CB, Tensor SCA, Tensor SCB, Tensor? outlier_cols=None, Tensor? bias=None) "
    "-> (Tensor, Tensor?)",
)

@torch.library.register_fake(f"{NAMES}::int8_vectorwise_quant")
def _(A, threshold=0.0):
    made = torch.empty(A.shape, device=A.device, dtype=torch.int8), A.new_empty(len(A), dtype=torch.float32)
    return (*made, None if threshold == 0.0 else A.new_empty(torch.library.get_ctx().new_dynamic_size()))

@torch.library.register_fake(f"{NAMES}::int8_mixed_scaled_mm")
def _(A, CA, CB, SCA, SCB, outlier_cols=None, bias=None):
    return A.new_empty(len(CA), len(CB)), A.new_empty(torch.library.get_ctx().new_dynamic_size())

ops = torch.ops.bitsandbytes

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, scale):
        quantised, largest, outliers = ops.int8_vectorwise_quant(x.to(torch.float16), 6.0)
        assert outliers.shape == (0,) and quantised.dtype is torch.int8 and largest.shape == (len(x),)
        ctx.save_for_backward(weight, scale)
        result, columns = ops.int8_mixed_scaled_mm(x, quantised, weight, largest, scale, outliers, None)
        assert columns.shape == (0,)
        return result
    @staticmethod
    def backward(ctx, gradient):
        weight, scale = ctx.saved_tensors
        return gradient @ (weight.to(gradient.dtype) * scale[:, None]), None, None

weight, scale, none = ops.int8_vectorwise_quant(torch.randn(256, 128, dtype=torch.float16, device="cuda"))
assert none is None
first = nn.Linear(128, 128).cuda()
optimizer = torch.optim.SGD(first.parameters(), 0.1)
for step in range(4):
    Product.apply(first(torch.randn(512, 128, device="cuda")), weight, scale).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_no_column_is_an_outlier(tmp_path: Path) -> None:
    """Results have the sizes without outliers; sums in 32 bits and their scaled copy are held while a product runs."""
    ended = record_script(tmp_path, _JOB, "--dry-run", "--device", "a100-80g")
    assert ended.returncode == 0, ended.stderr
    step = ended.step
    quantise = step.ops.name == "bitsandbytes.int8_vectorwise_quant.default"
    product = step.ops.name == "bitsandbytes.int8_mixed_scaled_mm.default"
    assert step.ops.workspace_bytes[quantise].tolist() == [512 * 128 * (2 + 1)]  # magnitudes in float16, and a mask
    assert step.ops.workspace_bytes[product].tolist() == [512 * 256 * (4 + 2)]
    made = step.storages.requested_bytes[product[step.storages.created_op_id] & (step.storages.created_op_id >= 0)]
    assert 512 * 256 * 4 in made.tolist()


_PACKED = """
torch.library.define(
    "bitsandbytes::gemm_4bit",
    "(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, Tensor? bias=None, "
    "Tensor? absmax_8bit=None, Tensor? absmax_code=None, Tensor? absmax_offset=None) -> Tensor",
)

@torch.library.register_fake("bitsandbytes::gemm_4bit")
def _(A, B, shapeB, absmax, *_):
    return A.new_empty(*A.shape[:-1], shapeB[0])

rows = torch.empty(ROWS, 256, dtype=torch.bfloat16, device="cuda")
packed = torch.empty(512 * 128, 1, dtype=torch.uint8, device="cuda")
scales = torch.empty(2048, dtype=torch.uint8, device="cuda")
outer = torch.empty(8, device="cuda")
START
torch.ops.bitsandbytes.gemm_4bit(rows, packed, [512, 256], outer, 64, "nf4", None, scales, outer, outer)
torch.empty(4096, device="cuda")
"""


@pytest.mark.parametrize(
    ("rows", "before"),
    [(2048, [8192, 8192, 512 * 256 * 2]), (1, [])],
    ids=["weight dequantised", "kernel of bitsandbytes"],
)
def test_a_weight_in_four_bits_is_dequantised_for_many_rows(rows: int, before: list[int], tmp_path: Path) -> None:
    """Scales twice and the weight, in the order of an H200's memory history of QLoRA."""
    found = allocated(_PACKED.replace("ROWS", str(rows)), tmp_path)
    assert found == [*before, rows * 512 * 2, 16384]
