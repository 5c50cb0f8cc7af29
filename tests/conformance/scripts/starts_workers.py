"""Trains in the first process and in children of both kinds."""

import sys

import torch.multiprocessing
from training import train


def work(rank):
    print("rank", rank, sys.argv, flush=True)
    train()
    if rank == 1:
        raise ValueError(f"rank {rank} fails")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train()
    context = torch.multiprocessing.get_context(sys.argv[1])
    for rank in range(2):
        process = context.Process(target=work, args=(rank,))
        process.start()
        process.join()
        print(rank, process.exitcode, flush=True)
