#!/usr/bin/env bash
# torch 2.13.0: fully_shard (FSDP2) reduces the gradients of a group into one buffer, and each parameter's gradient is a
# view of it. Setting gradients to None one by one, as updates in backward do to free each at once, frees nothing until
# the group's last; one gradient that is kept keeps the buffer. torch.save of one writes all. Where fully_shard is
# called on the root alone, the buffer is that of the whole model. Without FSDP each is a storage of its own. Two
# processes on gloo, 4 layers of 1 MiB; a rank's half is 2 MiB. Seen on 2026-11-30.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >job.py <<'PY'
import io
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def local(gradient):
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def held(model):
    storages = [local(each.grad).untyped_storage() for each in model.parameters() if each.grad is not None]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values()) // 2**10


def measure(rank, store, said):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name in ("plain", "each layer", "root only"):
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(4)])
        if name == "each layer":
            for layer in model:
                fully_shard(layer, mesh=mesh)
        if name != "plain":
            fully_shard(model, mesh=mesh)
        model(torch.ones(1, 512)).sum().backward()
        written = io.BytesIO()
        torch.save(local(model[0].weight.grad), written)
        seen = [held(model)]
        for layer in model:
            layer.weight.grad = None
            seen.append(held(model))
        if rank == 0:
            with open(said, "a") as file:
                file.write(f"{name}: KiB held as each is set to None {seen}; saving one writes {len(written.getvalue()) // 2**10} KiB\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (os.path.join(folder, "store"), os.path.join(folder, "said")), nprocs=2)
        with open(os.path.join(folder, "said")) as file:
            print(file.read(), end="")
PY
venv/bin/python -W ignore job.py 2>errors | tee seen
diff - seen <<'SEEN'
plain: KiB held as each is set to None [4096, 3072, 2048, 1024, 0]; saving one writes 1025 KiB
each layer: KiB held as each is set to None [2048, 1536, 1024, 512, 0]; saving one writes 513 KiB
root only: KiB held as each is set to None [2048, 2048, 2048, 2048, 0]; saving one writes 2049 KiB
SEEN
