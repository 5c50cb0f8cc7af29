"""fully_shard and its settings, or FSDP1: ``fsdp.py [mixed|short|offload|kept|pairs|prefetch|hybrid|saved|old...]``."""

from __future__ import annotations

import functools
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from small_gpt import GPT, Block, begin, train
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

KIND = sys.argv[1] if len(sys.argv) > 1 else ""
device = begin()
model = GPT(words=257)  # does not divide evenly
if KIND != "offload":
    model = model.to(device)
options: dict[str, object] = {}
if KIND == "mixed":
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
if KIND == "short":  # the type of the reduction is torch's choice
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
if KIND == "offload":
    options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
if KIND in ("kept", "pairs"):
    options["reshard_after_forward"] = 2 if KIND == "pairs" else False
if KIND == "hybrid":
    shape = (2, dist.get_world_size() // 2)
    options["mesh"] = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
if KIND.startswith("old"):
    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    strategy = ShardingStrategy.SHARD_GRAD_OP if KIND == "old_grad" else ShardingStrategy.FULL_SHARD
    model = FullyShardedDataParallel(model, auto_wrap_policy=wrap, device_id=device, sharding_strategy=strategy)
else:
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
if KIND == "prefetch":
    layers = list(model.layers)
    for place in range(len(layers) - 2):
        layers[place].set_modules_to_forward_prefetch(layers[place + 1 : place + 3])
        layers[-1 - place].set_modules_to_backward_prefetch([layers[-2 - place], layers[-3 - place]])


def save(step: int, optimizer: torch.optim.Optimizer) -> None:
    """Saves a distributed checkpoint after the first step, and loads it."""
    if KIND == "saved" and step == 1:
        weights, states = get_state_dict(model, optimizer)
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        checkpoint.save({"weights": weights, "states": states}, checkpoint_id=folder[0])
        checkpoint.load({"weights": weights, "states": states}, checkpoint_id=folder[0])


train(model, model.parameters(), device, after_step=save)
