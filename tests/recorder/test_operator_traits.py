"""What all runs of an operator have in common."""

from __future__ import annotations

import warnings

import torch
from torch._subclasses import FakeTensorMode

from memprof.recorder.calls.operator_traits import OperatorTraits, _span


def test_attention_on_the_cpu_has_the_flops_of_attention_elsewhere() -> None:
    """Forward has 2 products of 8 x 16 by 16 x 8 for each of 4 heads, backward 5. Torch has no formula for these."""
    heads = torch.ones(1, 4, 8, 16)
    product = 2 * 4 * 8 * 16 * 8
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, log_sum = forward(heads, heads, heads)
    assert OperatorTraits(forward, 0).count_flops((heads,) * 3, {}, (out, log_sum)) == 2 * product
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    given = (heads, heads, heads, heads, out, log_sum, 0.0, False)
    assert OperatorTraits(backward, 0).count_flops(given, {}, backward(*given)) == 5 * product


def test_the_address_of_a_fake_tensor_is_not_read() -> None:
    """torch would warn the user of it."""
    with FakeTensorMode():
        fake = torch.ones(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _span(fake) == (0, 64)
