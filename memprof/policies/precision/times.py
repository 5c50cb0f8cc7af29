"""Estimates operator durations in a short type by fixed ratios, without measuring the new run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.precision.autocast_lists import FIRST, SHORT, WIDEST
from memprof.trace.schema import NONE, Bools, Floats, Ints

if TYPE_CHECKING:
    from memprof.policies.precision.flow import Types
    from memprof.policies.rewrite.draft import Draft
    from memprof.trace.step import Step

#: Duration of an operator in the short type on a CPU relative to float32, forward and backward. Measured with torch
#: 2.13 on one thread of a machine with AVX-512 and bf16 instructions (AMD EPYC), best of three runs of the six sample
#: jobs; a machine without bf16 instructions is slower. fp16 has no fast products on such a CPU.
CPU_RATIOS: dict[str, dict[str, tuple[float, float]]] = {
    "bf16": {
        "mm": (0.56, 0.54),
        "addmm": (0.57, 0.54),
        "bmm": (0.56, 0.54),
        "baddbmm": (0.56, 0.54),
        "convolution": (0.62, 1.0),
        "mkldnn_rnn_layer": (0.6, 0.28),
        "_scaled_dot_product_flash_attention_for_cpu": (1.27, 5.0),
        "native_batch_norm": (0.34, 0.92),
        "native_layer_norm": (1.25, 1.65),
        "gelu": (0.74, 0.86),
        "silu": (1.4, 1.4),
        "tanh": (0.57, 0.8),
        "relu_": (1.7, 0.83),
        "bernoulli_": (1.0, 1.0),
    },
    "fp16": {
        "mm": (14.0, 15.0),
        "addmm": (14.0, 15.0),
        "bmm": (14.0, 15.0),
        "convolution": (8.0, 10.0),
        "_scaled_dot_product_flash_attention_for_cpu": (6.0, 11.0),
    },
}
#: The same for large pointwise operators on a CPU: they run in the cache, and are not bound by bytes.
CPU_POINTWISE = 0.87
#: Matrix products on CUDA that ran in TF32, or where the device's speed is not known: the ratio of the tensor cores'
#: peak rates (TF32 to bf16 and fp16 on A100 and H100, NVIDIA data sheets).
CUDA_PRODUCT = 0.5
#: Products faster than this multiple of the device's rate in float32 ran in TF32.
_TF32_FROM = 1.2
#: Convolutions on CUDA, which run in TF32 by default: 0.63 to 0.74 in ResNet-50 and a ViT on an H200, torch 2.11.
CUDA_CONVOLUTION = 0.67
#: Fused attention on CUDA, relative to what products gain: 1.5 to 2.3 in a GPT and a ViT on an H200.
CUDA_ATTENTION = 2.0
#: Batch norms in bf16 on CUDA, forward and backward: cuDNN's run in float32 and fp16 only; ResNet-50 on an H200.
CUDA_BATCH_NORM = (1.72, 1.29)

#: Bytes per microsecond if the step has no operator to derive it from.
FALLBACK_RATE = 4000.0
#: Below this size an operator's duration is its launch, not its bytes.
LARGE_BYTES = 65536
#: Minimum cost of an operator: the median of the small casts measured.
START_US = 6.0


class Rates:
    """Memory throughput of the recording machine in memory-bound operators."""

    def __init__(self, step: Step, types: Types) -> None:
        """Derives the rate from the step's large pointwise operators."""
        ops = step.ops
        moved = ops.read_bytes + ops.written_bytes
        is_sample = (types.region != NONE) & np.isin(types.rule, (WIDEST, FIRST)) & (moved >= LARGE_BYTES)
        is_sample &= (ops.duration_us > 0) & ~ops.uses_rng
        times = ops.duration_us[is_sample]
        self.bytes_per_us = float(np.median(moved[is_sample] / times)) if len(times) else FALLBACK_RATE

    def cast_us(self, moved: Ints) -> Floats:
        """Returns the durations of casts that move the given bytes."""
        return START_US + moved / self.bytes_per_us


def retime(draft: Draft, step: Step, types: Types, rates: Rates, dtype: str) -> None:
    """Scales the operators' durations, and the step's with them."""
    ops, uses, storages = step.ops, step.uses, step.storages
    whole = np.zeros(len(ops))
    less = np.zeros(len(ops))
    sizes = storages.requested_bytes[uses.storage_id].astype(np.float64)
    np.add.at(whole, uses.op_id, sizes)
    after = draft.storages
    np.add.at(less, uses.op_id, after.requested_bytes[draft.uses.storage_id[: len(uses)]])
    share = np.where(whole > 0, less / np.maximum(whole, 1), 1.0)
    forward = types.forward
    of_op = np.where(forward != NONE, forward, np.arange(len(ops)))
    is_inside = (types.region[of_op] != NONE) & types.is_short_out[of_op]
    is_bound = (whole >= LARGE_BYTES) & ((less < whole) | is_inside)
    if types.device == "cuda" or step.planned_types is not None:
        ratio = np.where(is_bound, share, 1.0)
        _on_cuda(ratio, step, types, rates, of_op, is_inside, dtype)
    else:
        ratio = np.where(is_bound & is_inside, CPU_POINTWISE, 1.0)
        is_backward = forward != NONE
        for name, (ahead, back) in CPU_RATIOS[dtype].items():
            rows = np.flatnonzero(is_inside & (types.names[of_op] == name))
            ratio[rows] = np.where(is_backward[rows], back, ahead)
    old = np.nan_to_num(ops.duration_us)
    durations = draft.ops.duration_us.copy()
    durations[: len(ops)] *= ratio
    bytes_read, bytes_written = draft.ops.read_bytes.copy(), draft.ops.written_bytes.copy()
    bytes_read[: len(ops)] = np.round(bytes_read[: len(ops)] * share)
    bytes_written[: len(ops)] = np.round(bytes_written[: len(ops)] * share)
    draft.ops = draft.ops.replace(duration_us=durations, read_bytes=bytes_read, written_bytes=bytes_written)
    # Executor overhead: the step takes longer than its operators, or less where they run concurrently.
    total = old.sum()
    executor = step.duration_us / total if total > 0 else 1.0
    draft.duration_us = step.duration_us + executor * (np.nan_to_num(durations).sum() - total)


def _on_cuda(ratio: Floats, step: Step, types: Types, rates: Rates, of_op: Ints, is_inside: Bools, dtype: str) -> None:
    """Sets the ratios of products, attention, convolutions and batch norms on CUDA."""
    ops, names = step.ops, types.names[of_op]
    is_product = is_inside & (types.rule[of_op] == SHORT)
    plain, short = step.product_flops_per_us
    ratio[is_product] = CUDA_PRODUCT
    if plain and short:
        took_us = np.maximum(np.nan_to_num(ops.duration_us), 1e-9)
        is_plain = is_product & (ops.flops / took_us <= _TF32_FROM * plain)
        # A small product is bound by the bytes that it moves, or by its launch.
        bound_us = START_US / 2 + (ops.read_bytes + ops.written_bytes) / (2 * rates.bytes_per_us)
        gain = np.maximum(plain / short, np.minimum(bound_us / took_us, 1.0))
        ratio[is_plain] = gain[is_plain]
        is_attention = is_product & np.char.startswith(names.astype(str), "_scaled_dot_product")
        ratio[is_attention] = min(CUDA_ATTENTION * plain / short, CUDA_PRODUCT)
    ratio[is_product & (names == "convolution")] = CUDA_CONVOLUTION
    if dtype == "bf16":
        is_norm = is_inside & (names == "cudnn_batch_norm")
        ratio[is_norm] = np.where(types.forward[is_norm] == NONE, *CUDA_BATCH_NORM)
