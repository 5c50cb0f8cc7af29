"""Workspaces of large operators in dry runs of the processor, from smaller batches, beside what a run takes."""

from __future__ import annotations

import pytest
import torch

from memprof.recorder.profiler.native import NativeEvents
from memprof.virtual.sizes import kernel_probe, workspace_law

_aten = torch.ops.aten
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
