"""Determines this process's rank, and connects the ranks of a job."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from memprof.errors import PolicyError
from memprof.policies.runtime.job import Job

#: Environment variables that torchrun sets in each process.
_TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_DEVICES = "CUDA_VISIBLE_DEVICES"
#: Named so since torch 2.13, where the older name warns.
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def choose_device() -> None:
    """Restricts a torchrun process to the device of its rank.

    A script that uses ``cuda`` or ``cuda:0`` then trains on its own device. Must run before CUDA is initialised.

    Raises:
        PolicyError: This machine has fewer devices than ranks.
    """
    cuda: Any = torch.cuda  # not annotated
    if any(name not in os.environ for name in _TOLD) or cuda.is_initialized():
        return
    count = torch.cuda.device_count()
    if count <= 1 and not torch.cuda.is_available():
        return
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if ranks > count:
        raise PolicyError(
            f"shard has {ranks} ranks on this machine, which has {count} CUDA device{'s' * (count != 1)}: start as "
            f"many ranks as there are devices, or hide the devices to train on CPU: {_DEVICES}=''."
        )
    visible = os.environ.get(_DEVICES, "")
    names = [name.strip() for name in visible.split(",") if name.strip()] or [str(each) for each in range(count)]
    os.environ[_DEVICES] = names[local]


def join_ranks(job: Job, world_size: int) -> int:
    """Joins the other ranks, unless the job has already done so.

    Args:
        job: The job; its device selects the backend: NCCL on CUDA, gloo elsewhere.
        world_size: Number of ranks in the plan.

    Returns:
        This process's rank.

    Raises:
        PolicyError: The job has no ranks, or another number of them.
    """
    is_joined = dist.is_available() and dist.is_initialized()
    missing = [name for name in _TOLD if name not in os.environ]
    if not dist.is_available():
        raise PolicyError("shard needs torch.distributed, which this torch was built without.")
    if not is_joined and missing:
        raise PolicyError(
            f"shard needs {world_size} ranks, and this job is a single process: start it with torchrun "
            f"--nproc-per-node {world_size}, or let memprof do so: memprof record --plan PLAN train.py"
        )
    there = dist.get_world_size() if is_joined else int(os.environ["WORLD_SIZE"])
    if there != world_size:
        raise PolicyError(
            f"the plan shards over {world_size} ranks, and this job has {there}: start it with torchrun "
            f"--nproc-per-node {world_size}, or shard over {there} with --world-size {there}."
        )
    if not is_joined:
        dist.init_process_group("nccl" if job.device.type == "cuda" else "gloo")
        job.on_undo(_leave)
    return dist.get_rank()


def start_alike(model: torch.nn.Module) -> None:
    """Broadcasts rank 0's initial parameters and buffers to all ranks."""
    for tensor in (*model.parameters(), *model.buffers()):
        # No effect if the script draws the same numbers in each process.
        dist.broadcast(tensor.detach(), 0)


def gather(whole: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Fills a buffer with the parts of all ranks, in order.

    Over gloo each rank's part is broadcast within the buffer: gloo's own all-gather copies the whole, and the copy
    lives until one of its threads drops it.

    Args:
        whole: The buffer, flat.
        part: This rank's part, which may already lie at its place in the buffer.
        group: The ranks; all by default.
    """
    if not is_gloo(whole.device, group):
        assert _all_gather is not None
        _all_gather(whole, part, group=group)
        return
    pieces = whole.chunk(dist.get_world_size(group))
    own = pieces[dist.get_rank(group)]
    if own.data_ptr() != part.data_ptr():
        own.copy_(part)
    for rank, piece in enumerate(pieces):
        dist.broadcast(piece, group=group, group_src=rank)


def is_gloo(device: torch.device, group: dist.ProcessGroup | None = None) -> bool:
    """Returns whether the ranks communicate through gloo; in a dry run, without communication, whether they would."""
    backend = dist.get_backend(group)
    return bool(backend == "gloo" or (backend == "fake" and device.type == "cpu"))


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
