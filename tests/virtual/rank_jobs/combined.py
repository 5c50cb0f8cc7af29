"""Several techniques of a distributed job at once: ``combined.py no_sync|late|recomputed|grid|v|async``.

Gradients accumulated without communication, in DistributedDataParallel or in fully_shard; layers recomputed inside
fully_shard; a pipeline whose stages are sharded; one whose first rank also has the last stage; and a distributed
checkpoint that is saved in the background.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from small_gpt import GPT, STEPS, begin, draw, loss_of, train
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble
from torch.nn.parallel import DistributedDataParallel

KIND = sys.argv[1]
MICRO_BATCHES = 4
HALVES = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
device = begin()


@contextlib.contextmanager
def without_communication(model: nn.Module) -> Iterator[None]:
    """Accumulates gradients on this rank."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


def accumulate(model: nn.Module) -> None:
    """Trains with two batches in each step, of which only the second is communicated."""
    place = torch.device("cpu", 0) if device.type == "cpu" else device  # as accelerate names it
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(STEPS):
        with without_communication(model):
            ids = draw(place)
            loss_of(model(ids), ids).backward()
        ids = draw(place)
        loss_of(model(ids), ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(model, DistributedDataParallel):
        model._get_ddp_logging_data()  # as Lightning does
    dist.destroy_process_group()


def shard(model: GPT, *, is_recomputed: bool = False) -> GPT:
    """Shards each layer, and the rest, in half precision."""
    model = model.to(device)
    for place, layer in enumerate(model.layers):
        if is_recomputed:
            model.layers[place] = checkpoint_wrapper(layer)
        fully_shard(model.layers[place], mp_policy=HALVES, reshard_after_forward=place % 2 == 0)
    return fully_shard(model, mp_policy=HALVES)


def train_stages() -> None:
    """Trains a pipeline: of two stages sharded over the other ranks, or of two stages on each rank, there and back."""
    ranks = dist.get_world_size()
    is_grid = KIND == "grid"
    lines = 2 if is_grid else ranks
    mesh = init_device_mesh(device.type, (lines, ranks // lines), mesh_dim_names=("stages", "shards"))
    place = mesh.get_local_rank("stages")
    count = lines if is_grid else 2 * lines
    places = [place] if is_grid else [place, count - 1 - place]
    whole = GPT(layers=count)
    parts = []
    for number in places:
        first, last = [whole.embedding] if number == 0 else [], [whole.norm, whole.head] if number == count - 1 else []
        part = nn.Sequential(*first, whole.layers[number], *last).to(device)
        parts.append(fully_shard(part, mesh=mesh["shards"]) if is_grid else part)
    group = mesh["stages"].get_group()
    stages = [PipelineStage(part, at, count, device, group=group) for part, at in zip(parts, places, strict=True)]
    schedule = (
        Schedule1F1B(stages[0], MICRO_BATCHES, loss_fn=loss_of)
        if is_grid
        else ScheduleZBVZeroBubble(stages, 2 * ranks, loss_fn=loss_of)
    )
    optimizer = torch.optim.AdamW([one for part in parts for one in part.parameters()])
    for _ in range(STEPS):
        ids = draw(device, batch=2 * schedule._n_microbatches)
        target = {"target": ids} if count - 1 in places else {}
        schedule.step(*([ids] if 0 in places else []), **target)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def save(step: int, optimizer: torch.optim.Optimizer) -> None:
    """Saves a distributed checkpoint in another thread after the first step, and waits for it."""
    if KIND == "async" and step == 1:
        weights, states = get_state_dict(model, optimizer)
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        checkpoint.async_save({"weights": weights, "states": states}, checkpoint_id=folder[0]).result()


if KIND == "no_sync":
    accumulate(DistributedDataParallel(GPT().to(device), bucket_cap_mb=0.1))
elif KIND == "late":
    accumulate(shard(GPT()))
elif KIND in ("grid", "v"):
    train_stages()
else:
    model = shard(GPT(), is_recomputed=KIND == "recomputed")
    train(model, model.parameters(), device, after_step=save)
