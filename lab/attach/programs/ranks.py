"""Two ranks of DistributedDataParallel over gloo; only the first prints. For torchrun."""

import os

import torch
import torch.distributed as dist
from paced import digest, ready, step
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(9)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(rank)
for number in range(10):
    x, y = torch.randn(32, 16), torch.randint(4, (32,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(number, repr(total.item()), flush=True)
        if number == 3:
            ready(os.getppid())
    if number >= 3:
        step()
mine = [None, None]
dist.all_gather_object(mine, digest(model.parameters()))
if rank == 0:
    print(*mine)
dist.destroy_process_group()
