"""Prediction errors of the precision policy, observed on jobs its rules were not fitted to.

Measured over the jobs of docs/benchmarks.md ("Unseen jobs") on a processor with AVX-512 (AMD EPYC), and on
the samples with oneDNN limited to AVX2; fp16 kernels on 14 of these jobs and the samples on an Intel Xeon with AVX-512
FP16. The remaining error is workspaces of the processor's kernels. On a GPU the
libraries' workspaces do not depend on the type; there, the samples' targets are used until unseen jobs are measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memprof.policies.precision.autocast_lists import SHORT_TYPES, plain_names
from memprof.trace.schema import NONE

if TYPE_CHECKING:
    from memprof.trace.step import Step

#: Fractions below and above the prediction for steps with some operators; each adds to the general one.
ON_CPU = {
    (): (0.02, 0.015),
    ("convolution",): (0.01, 0.09),
    ("mkldnn_rnn_layer", "gru", "lstm"): (0.02, 0.01),
    ("embedding_bag", "_embedding_bag"): (0.18, 0.02),
    ("stft", "_fft_r2c", "_ctc_loss"): (0.10, 0.02),
}
ON_GPU = (0.03, 0.03)
#: Added where oneDNN computes in fp16.
FP16_KERNELS = (0.02, 0.05)
#: Added where backward runs through gradients, as with ``create_graph=True``; with short weights too, what the job
#: computes of them outside its models is short and predicted as float32.
OF_GRADIENTS, OF_SHORT_GRADIENTS = (0.03, 0.03), (0.12, 0.03)


def errors_of(step: Step, dtype: str, *, is_pure: bool) -> tuple[float, float]:
    """Returns by which fraction a measured peak may be below and above the predicted one.

    Args:
        step: The step as recorded.
        dtype: The short type: bf16 or fp16.
        is_pure: Whether the weights are short too.
    """
    if step.is_on_device():
        return ON_GPU
    names = set(plain_names(step.ops.name).tolist())
    known = [shares for kinds, shares in ON_CPU.items() if not kinds or not names.isdisjoint(kinds)]
    if dtype == "fp16" and SHORT_TYPES["fp16"] in step.short_types:
        known.append(FP16_KERNELS)
    forward = step.ops.forward_op_id[step.ops.forward_op_id != NONE]
    if np.any(step.ops.phase[forward] == "backward"):
        known.append(OF_SHORT_GRADIENTS if is_pure else OF_GRADIENTS)
    return sum(below for below, _ in known), sum(above for _, above in known)
