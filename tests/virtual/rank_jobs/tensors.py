"""Tensor parallelism: ``tensors.py [sequence|loss|two]``, the last with fully_shard in a second dimension."""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist
from small_gpt import GPT, STEPS, begin, draw, loss_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

KIND = sys.argv[1] if len(sys.argv) > 1 else ""
device = begin()
ranks = dist.get_world_size()
across = 2 if KIND == "two" else ranks
mesh = init_device_mesh(device.type, (ranks // across, across), mesh_dim_names=("data", "tensor"))
model = GPT().to(device)
along = Shard(1) if KIND in ("sequence", "loss") else Replicate()
for layer in model.layers:
    wide, narrow = ColwiseParallel(input_layouts=along), RowwiseParallel(output_layouts=along)
    plan = {**dict.fromkeys(("query", "key", "value", "up"), wide), "out": narrow, "down": narrow}
    if along != Replicate():
        plan |= {"norm_1": SequenceParallel(use_local_output=True), "norm_2": SequenceParallel(use_local_output=True)}
    parallelize_module(layer, mesh["tensor"], plan)
plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=along)}
if along != Replicate():
    plan["norm"] = SequenceParallel()
is_split = KIND == "loss"
plan["head"] = ColwiseParallel(
    input_layouts=along, output_layouts=Shard(-1) if is_split else Replicate(), use_local_output=not is_split
)
parallelize_module(model, mesh["tensor"], plan)
if KIND == "two":
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(STEPS):
    ids = draw(device)
    with loss_parallel() if is_split else contextlib.nullcontext():
        loss_of(model(ids), ids).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
