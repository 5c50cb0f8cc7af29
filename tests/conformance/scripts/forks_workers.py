"""Starts children with multiprocessing and as a data loader does, inside its training."""

import multiprocessing
import sys

import torch
from training import make, step


def work(number):
    model, optimizer = make(number)
    print("worker", number, step(model, optimizer).hex(), flush=True)
    sys.exit(number)


if __name__ == "__main__":
    torch.set_num_threads(1)  # OpenMP's threads do not cross a fork, with or without memprof
    context = multiprocessing.get_context("fork")
    model, optimizer = make()
    data = torch.utils.data.DataLoader(torch.arange(32.0).reshape(-1, 1), batch_size=8, num_workers=2)
    for number in range(5):
        print(step(model, optimizer).hex(), flush=True)
        process = context.Process(target=work, args=(number,))
        process.start()
        process.join()
        print(process.exitcode, sum(float(batch.sum()) for batch in data), flush=True)
    with context.Pool(2) as pool:
        print(pool.map(abs, range(-4, 0)))
