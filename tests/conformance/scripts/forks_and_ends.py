"""Forks at one place of its training, and has the child end in the usual ways."""

import os
import sys

import torch
from training import make, step


def fork(work, status=0):
    """Forks; the child does some work and then ends as a script does, through Python's and C's own ways out."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        print("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        return
    work()
    sys.stdout.flush()
    sys.exit(status)


def nothing():
    print("child", flush=True)


def trains():
    own, its = make(1)
    for _ in range(5):
        print("child", step(own, its).hex(), flush=True)


def profiles():
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(3) + 1
    print(sorted((event.key, event.count) for event in profiler.key_averages()), flush=True)


def forks():
    fork(nothing, 4)


def raises():
    raise ValueError("in a child")


def in_backward(work):
    """Makes a batch whose gradient has work done inside backward."""
    batch = torch.randn(8, 16, requires_grad=True)
    batch.register_hook(lambda _: work())
    return batch


torch.set_num_threads(1)  # OpenMP's threads do not cross a fork, with or without memprof
place, what = sys.argv[1:3]
work = {"nothing": nothing, "trains": trains, "profiles": profiles, "forks": forks, "raises": raises}[what]
if place == "before":
    fork(work, 3)
model, optimizer = make()
for number in range(6):
    if (place, number) in (("within", 2), ("first", 0)):
        fork(work, 3)
    batch = in_backward(lambda: fork(work, 3)) if (place, number) == ("backward", 2) else None
    print(step(model, optimizer, batch).hex(), flush=True)
if place == "after":
    fork(work, 3)
if place == "last":  # the child goes on where the script does, and returns from it
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    print("parent" if child else "child", step(model, optimizer).hex(), flush=True)
