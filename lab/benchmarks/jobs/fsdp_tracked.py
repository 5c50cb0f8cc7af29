"""Tracks one rank of the small GPT under fully_shard with torch's own FSDPMemTracker, and prints its result."""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.policies.jobs import gpt


def main() -> None:
    """Runs three steps under the tracker, the last of which is what a recording calls steady."""
    torch.manual_seed(0)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    loader = gpt.make_loader()
    model = gpt.make_model()
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = gpt.make_optimizer(model)
    tracker = FSDPMemTracker(model, optimizer)
    batches = iter(loader)
    peak, seconds = 0, 0.0
    for _ in range(3):
        batch = next(batches)
        tracker.track_inputs(tuple(batch))
        start = time.perf_counter()
        with tracker:
            optimizer.zero_grad()
            loss = gpt.loss_of(model, batch)
            loss.backward()
            optimizer.step()
        seconds = time.perf_counter() - start
        del loss
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        tracker.reset_mod_stats()
    print(json.dumps({"peak": int(peak), "seconds": seconds}))


if __name__ == "__main__":
    main()
