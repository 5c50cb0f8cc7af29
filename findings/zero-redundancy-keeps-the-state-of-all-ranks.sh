#!/usr/bin/env bash
# torch 2.13.0: ZeroRedundancyOptimizer divides the optimizer's state among ranks. consolidate_state_dict(to=0), needed
# before each checkpoint, leaves the state of all other ranks in rank 0's host memory (it copies it to the CPU), and
# nothing lets go of it: not the end of the saving, nor later steps. On the CPU rank 0 holds from its first checkpoint
# on what it would hold without ZeRO. Two processes on gloo, AdamW, 4 layers of 1 MiB each; bytes are those of storages
# that gc finds. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import gc
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.optim import ZeroRedundancyOptimizer


def held():
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor):
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values()) / 2**20


def train(rank, store, divided, said):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)])
    if divided:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    else:
        optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    seen = [held()]
    if divided:
        optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save(optimizer.state_dict(), os.devnull)
    seen.append(held())
    for _ in range(3):
        step()
    seen.append(held())
    if rank == 0:
        with open(said, "w") as file:
            file.write("MiB before the checkpoint {:.0f}, after it {:.0f}, three steps later {:.0f}".format(*seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    for divided in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            said = os.path.join(folder, "said")
            mp.spawn(train, (os.path.join(folder, "store"), divided, said), nprocs=2)
            with open(said) as file:
                print(f"{'ZeroRedundancyOptimizer' if divided else 'AdamW'}, rank 0: {file.read()}")
PY
venv/bin/python -W ignore job.py 2>errors | tee seen
diff - seen <<'SEEN'
AdamW, rank 0: MiB before the checkpoint 12, after it 12, three steps later 12
ZeroRedundancyOptimizer, rank 0: MiB before the checkpoint 8, after it 12, three steps later 12
SEEN
