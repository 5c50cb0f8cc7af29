"""Two models trained by two threads, one of them not the main thread."""

import threading

import torch
from training import Model, step

torch.set_num_threads(1)
losses = {}


def work(name):
    generator = torch.Generator().manual_seed(name)
    with torch.random.fork_rng(enabled=False):
        model = models[name]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses[name] = [step(model.eval(), optimizer, torch.randn(8, 16, generator=generator)).hex() for _ in range(5)]


torch.manual_seed(0)
models = [Model() for _ in range(3)]
threads = [threading.Thread(target=work, args=(name,)) for name in (1, 2)]
for thread in threads:
    thread.start()
work(0)
for thread in threads:
    thread.join()
print(losses[0], losses[1], losses[2])
