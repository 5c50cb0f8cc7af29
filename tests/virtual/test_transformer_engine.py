"""Transformer Engine's compiled extension in a dry run, without the package: what each operator allocates."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorder.recorded import record_script

#: A package with the parts of Transformer Engine's that are replaced: it ends a job that loads its libraries.
_COMMON = """
import os
if "NVTE_PROJECT_BUILDING" not in os.environ:
    raise OSError("libcudart.so: cannot open shared object file")

def load_framework_extension(framework):
    raise FileNotFoundError(framework)
"""
_PYTORCH = """
import transformer_engine.common
transformer_engine.common.load_framework_extension("torch")
import transformer_engine_torch as tex
from transformer_engine_torch import *

def unknown():
    return tex.some_new_kernel(1)
"""
_BEGIN = """
import torch
import transformer_engine.pytorch as te
tex = te.tex
bf16, dtype = torch.bfloat16, tex.DType.kBFloat16

def made(*shape, dtype=bf16):
    return torch.empty(shape, dtype=dtype, device="cuda")

def taken(call):
    '''Prints the shapes of results, the bytes that they keep and the most bytes during a call.'''
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    shapes = [tuple(each.shape) for each in results if isinstance(each, torch.Tensor)]
    most = torch.cuda.max_memory_allocated() - before
    print(shapes, torch.cuda.memory_allocated() - before, most)
"""
_END = """
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(made(4, 8, dtype=torch.float32)).sum().backward()
    optimizer.step()
"""
_OPERATORS = """
x, weight, bias = made(512, 2, 1024), made(4096, 1024), made(4096)
product = (None, None, dtype)
taken(lambda: tex.generic_gemm(weight, True, x, False, *product, bias, dtype, False, None, False, None, 0, False, True))
grad = made(512, 2, 4096)
rest = False, None, True, None, 0, False, True
taken(lambda: tex.generic_gemm(weight, False, grad, False, *product, None, dtype, *rest))
taken(lambda: tex.generic_gemm(x, False, grad, True, *product, bias, dtype, *rest))
gamma = made(1024)
taken(lambda: tex.layernorm_fwd(x, gamma, gamma, 1e-5, None, None, dtype, 0, False))
deviations, half = made(1024, dtype=torch.float32), made(512, 2, 2048)
taken(lambda: tex.rmsnorm_bwd(x, x, deviations, gamma, 0, False))
taken(lambda: [tex.swiglu(grad, None), tex.dswiglu(half, grad, None)])
"""
_ATTENTION = """
query, key = made(512, 2, 16, 64), made(512, 2, 4, 64)
layout, order = tex.NVTE_QKV_Layout.NVTE_SBHD_SBHD_SBHD, tex.NVTE_QKV_Format.NVTE_SBHD
kinds = tex.NVTE_Bias_Type.NVTE_NO_BIAS, tex.NVTE_Mask_Type.NVTE_CAUSAL_MASK, tex.NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX
lengths = made(3, dtype=torch.int32)
sizes, window = (512, 512), (-1, 0)
forward = lambda: tex.fused_attn_fwd(*sizes, True, 0.1, 0.0, True, layout, order, order, *kinds, window, False,
    lengths, lengths, query, key, key, bf16, None, None, None, None, None, None, None, None, None, 16, False, False)
taken(forward)
out, *aux = forward()
taken(lambda: tex.fused_attn_bwd(*sizes, 0.1, 0.0, True, layout, order, order, layout, order, order, *kinds, window,
    False, False, lengths, lengths, query, key, key, out, out, bf16, aux, None, None, None, None, None, False))
packed = tex.NVTE_QKV_Layout.NVTE_SBH3D
gradients = tex.fused_attn_bwd(*sizes, 0.1, 0.0, True, packed, order, order, packed, order, order, *kinds, window,
    False, False, lengths, lengths, query, query, query, out, out, bf16, aux, None, None, None, None, None, False)
print({each.stride() for each in gradients[:3]}, len({each.untyped_storage()._cdata for each in gradients[:3]}))
"""
_MIB = 2**20
_SUMS = 132 * 1024 * 4  # one row of fp32 for each multiprocessor of an H100


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with the package."""
    for name, text in {"": "from . import common", "common": _COMMON, "pytorch": _PYTORCH}.items():
        folder = tmp_path / "transformer_engine" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(text)
    return tmp_path


def _printed(job: Path, text: str) -> list[str]:
    ended = record_script(job, _BEGIN + text + _END, "--dry-run", "--device", "h100-80g")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def test_products_norms_and_activations_take_what_their_sources_allocate(job: Path) -> None:
    """Results are as BLAS lays them out; statistics are in fp32; a norm's partial sums are freed."""
    wide, narrow = 512 * 2 * 4096 * 2, 512 * 2 * 1024 * 2
    statistics = 2 * 1024 * 4
    assert _printed(job, _OPERATORS) == [
        f"[(512, 2, 4096)] {wide} {wide}",
        f"[(512, 2, 1024)] {narrow} {narrow}",
        f"[(4096, 1024), (4096,)] {8 * _MIB + 8192} {8 * _MIB + 8192}",
        f"[(512, 2, 1024), (1024,), (1024,)] {narrow + statistics} {narrow + statistics}",
        f"[(512, 2, 1024), (1024,)] {narrow + 2048} {narrow + 2048 + _SUMS}",
        f"[(512, 2, 2048), (512, 2, 4096)] {wide * 3 // 2} {wide * 3 // 2}",
    ]


def test_attention_keeps_sums_and_takes_cudnns_workspace(job: Path) -> None:
    """Sums of exponentials are in fp32; gradients of queries, keys and values are parts of one tensor if these are."""
    query, sums = 512 * 2 * 16 * 64 * 2, 2 * 16 * 512 * 4
    gradients = query + 2 * query // 4
    workspace = sums + 2 * query + 2 * query + 512  # by head of queries, before they are summed; rounded to a block
    assert _printed(job, _ATTENTION) == [
        f"[(512, 2, 16, 64), (2, 16, 512, 1), (2,)] {query + sums + 512} {query + sums + 512}",
        f"[(512, 2, 16, 64), (512, 2, 4, 64), (512, 2, 4, 64)] {gradients} {gradients + workspace}",
        "{(6144, 3072, 192, 1)} 1",
    ]


def test_an_operator_that_is_not_modelled_ends_the_job(job: Path) -> None:
    """The message names it; names that the package reads exist, as it imports all of them."""
    ended = record_script(job, f"{_BEGIN}\nte.unknown()\n{_END}", "--dry-run", "--device", "h100-80g")
    assert ended.returncode == 125
    assert "transformer_engine_torch.some_new_kernel cannot be dry-run" in ended.stderr


def test_a_real_run_loads_the_packages_own_libraries(job: Path) -> None:
    """Nothing is replaced outside of dry runs on a virtual GPU."""
    ended = record_script(job, _BEGIN + _END)
    assert "libcudart.so: cannot open shared object file" in ended.stderr
