"""DistributedDataParallel, or ZeRO-1 through it: ``ddp.py [view|static|unused|zero|join|bf16|fp16|power]``.

With ``join``, each rank has one batch less than the one before. The last three are communication hooks.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from small_gpt import GPT, STEPS, begin, train
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
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
if KIND == "bf16":
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
if KIND == "fp16":
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
if KIND == "power":
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3) if KIND == "zero" else None
if KIND == "join":
    train(model, model.parameters(), device, around=model.join(), steps=STEPS - dist.get_rank())
else:
    train(model, model.parameters(), device, zero)
