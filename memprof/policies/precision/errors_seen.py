"""Prediction errors of the precision policy, observed on jobs its rules were not fitted to.

Measured over the jobs of docs/benchmarks.md ("Unseen jobs") on a processor with AVX-512 (AMD EPYC), and on
the samples with oneDNN limited to AVX2; fp16 kernels on 14 of these jobs and the samples on an Intel Xeon with AVX-512
FP16. The remaining error is workspaces of the processor's kernels. On a GPU the
libraries' workspaces do not depend on the type; there, the samples' targets are used until unseen jobs are measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from memprof.policies.precision.autocast_lists import SHORT_TYPES, plain_names
from memprof.policies.precision.float32 import may_cast
from memprof.policies.rewrite.batch_state import differentiated_gradients
from memprof.replay.live import made_bytes
from memprof.trace.schema import NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memprof.trace.step import Step

#: Fractions below and above the prediction for steps with some operators; each adds to the general one.
ON_CPU = {
    (): (0.02, 0.03),
    ("convolution",): (0.01, 0.01),
    ("mkldnn_rnn_layer", "gru", "lstm"): (0.02, 0.01),
    ("embedding_bag", "_embedding_bag"): (0.18, 0.02),
    ("softplus",): (0.01, 0.05),
    ("stft", "_fft_r2c", "_ctc_loss"): (0.10, 0.02),
}
ON_GPU = (0.03, 0.03)
#: Added for convolutions with AMX, whose kernels choose their layouts by size.
TILED_CONVOLUTIONS = (0.02, 0.08)
#: Added for fp16, and again where oneDNN computes in it.
FP16, FP16_KERNELS = (0.02, 0.0), (0.02, 0.05)
#: Added where backward runs through gradients, as with ``create_graph=True``: residual-flows' needed 24 % more than
#: predicted; with short weights too, what the job computes of them outside its models is short and predicted as
#: float32 (16 % less with AMX, 21 % with AVX2).
OF_GRADIENTS, OF_SHORT_GRADIENTS = (0.03, 0.20), (0.20, 0.20)
#: Operators that make a tensor without another.
_FACTORIES = ("empty", "zeros", "ones", "full")
#: Errors of steps, by compute type and by whether the weights are short: a search asks for the same ones many times.
_FOUND: WeakKeyDictionary[Step, dict[tuple[str, bool], tuple[float, float]]] = WeakKeyDictionary()


def errors_of(steps: Sequence[Step], dtype: str, *, is_pure: bool) -> tuple[float, float]:
    """Returns by which fraction a measured peak may be below and above the predicted one.

    Args:
        steps: The steps as recorded; the largest errors among them count.
        dtype: The short type: bf16 or fp16.
        is_pure: Whether the weights are short too.
    """
    found = []
    for step in steps:
        known = _FOUND.setdefault(step, {})
        if (dtype, is_pure) not in known:
            known[dtype, is_pure] = _errors_of(step, dtype, is_pure=is_pure)
        found.append(known[dtype, is_pure])
    return max(below for below, _ in found), max(above for _, above in found)


def _errors_of(step: Step, dtype: str, *, is_pure: bool) -> tuple[float, float]:
    if step.is_on_device():
        return ON_GPU
    names = set(plain_names(step.ops.name).tolist())
    known = [shares for kinds, shares in ON_CPU.items() if not kinds or not names.isdisjoint(kinds)]
    if dtype == "fp16":
        known.append(FP16)
    if dtype == "fp16" and SHORT_TYPES["fp16"] in step.short_types:
        known.append(FP16_KERNELS)
    if step.has_amx and "convolution" in names:
        known.append(TILED_CONVOLUTIONS)
    if len(differentiated_gradients(step)):
        known.append(OF_SHORT_GRADIENTS if is_pure else OF_GRADIENTS)
    return sum(below for below, _ in known) + _open_share(step, names), sum(above for _, above in known)


def _open_share(step: Step, names: set[str]) -> float:
    """Returns by which fraction the step is smaller if the largest tensor made without operands is short.

    It is predicted in float32, which is what ``torch.empty(shape)`` gives; ``torch.empty(shape, dtype=x.dtype)`` has
    the type of x, and a recording in float32 does not tell them apart. Where the code asks for autocast's type, it is
    known.
    """
    if names.isdisjoint(_FACTORIES):
        return 0.0
    storages, uses, created = step.storages, step.uses, step.storages.created_op_id
    makes = np.isin(plain_names(step.ops.name), _FACTORIES) & (step.ops.phase == "forward")
    makes[uses.op_id[uses.role == "read"]] = False
    makes &= may_cast(step) & ~np.isin(step.ops.stack_id, list(step.in_autocast_type))
    is_open = (created != NONE) & (storages.dtype == "float32")
    is_open[is_open] = makes[created[is_open]]
    most = int(made_bytes(step).max(initial=0))
    largest = int(storages.requested_bytes[is_open].max(initial=0))
    # Half of it, as a share of a step in which all else is short, and a tenth more for what is computed of it.
    return 1.1 * largest / (most + largest) if most else 0.0
