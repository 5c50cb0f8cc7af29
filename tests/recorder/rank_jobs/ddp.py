"""DistributedDataParallel, or ZeRO-1 through it: ``ddp.py [view|static|unused|zero]``."""

from __future__ import annotations

import sys

import torch
from small_gpt import GPT, begin, train
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

KIND = sys.argv[1] if len(sys.argv) > 1 else ""
OPTIONS = {
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}
device = begin()
model = GPT().to(device)
model = DistributedDataParallel(model, bucket_cap_mb=0.1, **OPTIONS.get(KIND, {}))
zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3) if KIND == "zero" else None
train(model, model.parameters(), device, zero)
