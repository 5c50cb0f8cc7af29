"""Training in threads and coroutines, one function a case."""

import asyncio
import concurrent.futures
import queue
import sys
import threading

import in_turn
import torch
from torch import nn
from training import STEPS, make, step, train


def hogwild():
    """Several threads train one model; what is printed does not depend on who is first."""
    model, _ = make()
    model.eval()
    finished = []

    def work(seed):
        for _ in range(20):
            loss = model(torch.ones(4, 16) * seed).square().mean()
            for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
                parameter.data.sub_(gradient, alpha=0.001)  # past the version check: another thread is in its backward
        finished.append(seed)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(sorted(finished), bool(torch.isfinite(model.head.weight).all()))


def two_models():
    """Two threads train a model each, at the same time."""
    losses = {}

    def work(name):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        for position, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 0.01 * (position + 1))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        losses[name] = [step(model, optimizer, torch.ones(8, 16) * name).hex() for _ in range(12)]

    workers = [threading.Thread(target=work, args=(number,)) for number in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(sorted(losses.items()))


def pool():
    model, _ = make()
    model.eval()

    def evaluate(value):
        with torch.no_grad():
            return model(torch.full((2, 16), float(value))).sum().item().hex()

    with concurrent.futures.ThreadPoolExecutor(3) as workers:
        for _ in range(3):
            print(list(workers.map(evaluate, range(6))))
    train()


def steps_in_pool():
    """Each step runs in another thread."""
    model, optimizer = make()
    for number in range(6):
        with concurrent.futures.ThreadPoolExecutor(1) as worker:
            print(number, worker.submit(step, model, optimizer, torch.ones(8, 16)).result().hex())


def backward_elsewhere():
    """The forward pass in one thread, backward in a second, the update in a third."""
    model, optimizer = make()

    def run(function, *args):
        with concurrent.futures.ThreadPoolExecutor(1) as worker:
            return worker.submit(function, *args).result()

    for number in range(STEPS):
        batch = torch.ones(8, 16) * number
        torch.manual_seed(number)
        loss = model(batch).square().mean()
        run(optimizer.zero_grad)
        run(loss.backward)
        run(optimizer.step)
        print(number, loss.item().hex())


def graph_in_threads():
    """One graph, from which several threads go backward."""
    model, optimizer = make()
    for number in range(STEPS):
        outs = [model(torch.ones(2, 16) * each).square().mean() for each in range(3)]
        optimizer.zero_grad()
        for out in outs:
            worker = threading.Thread(target=out.backward)
            worker.start()
            worker.join()
        optimizer.step()
        print(number, [out.item().hex() for out in outs])


def coroutines():
    async def work(name):
        torch.manual_seed(name)
        model, optimizer = make(name)
        for number in range(4):
            print(name, number, step(model, optimizer, torch.ones(8, 16)).hex())
            await asyncio.sleep(0)

    async def main():
        await asyncio.gather(work(1), work(2))
        await asyncio.to_thread(print, "in a thread")

    asyncio.run(main(), debug=False)


def fed():
    """A thread makes the batches, as a prefetcher does."""
    ready = queue.Queue(2)

    def feed():
        generator = torch.Generator().manual_seed(3)
        for _ in range(6):
            ready.put(torch.randn(8, 16, generator=generator))
        ready.put(None)

    threading.Thread(target=feed, daemon=True).start()
    model, optimizer = make()
    while (batch := ready.get()) is not None:
        print(step(model, optimizer, batch).hex())


def parallel_backward():
    """Branches of one graph on the engine's own threads, and hooks there."""
    model, optimizer = make()
    names = set()
    model.head.weight.register_hook(lambda g: names.add(threading.current_thread() is threading.main_thread()))
    for number in range(STEPS):
        print(number, step(model, optimizer).hex(), names)


def local_state():
    """Grad mode, default dtype and autocast are each thread's own or the process's."""
    model, optimizer = make()

    def look():
        print(torch.is_grad_enabled(), torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), threading.local())

    for number in range(STEPS):
        with torch.no_grad(), torch.autocast("cpu"):
            worker = threading.Thread(target=look)
            worker.start()
            worker.join()
        print(number, step(model, optimizer).hex())


def timers():
    fired = threading.Event()
    threading.Timer(0.01, fired.set).start()
    train()
    print(fired.wait(5), threading.active_count())


if __name__ == "__main__":
    in_turn.call(globals())
