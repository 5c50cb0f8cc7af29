"""The flat copies of the gradients that DistributedDataParallel keeps, for a job that runs in one process."""

from __future__ import annotations

import torch
from torch import nn

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


def gradient_buckets(model: nn.Module) -> list[torch.Tensor]:
    """Returns one flat tensor for each bucket of DDP's reducer: its default sizes, gradient_as_bucket_view=False.

    Parameters are taken in reverse order; a bucket is closed once it reaches its size.
    """
    buckets, elements, limit_bytes = [], 0, FIRST_BUCKET_BYTES
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in reversed(parameters):
        elements += parameter.numel()
        if elements * parameter.element_size() >= limit_bytes:
            buckets.append(torch.zeros(elements, device=parameter.device))
            elements, limit_bytes = 0, BUCKET_BYTES
    if elements:
        buckets.append(torch.zeros(elements, device=parameters[0].device))
    return buckets
