"""Trains where attaching is hard: hostile.py WHAT."""

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import struct
import sys
import threading
import time
from pathlib import Path

_SECCOMP_NUMBERS = {"mkdir": 83, "rename": 82, "unlink": 87}  # of x86-64
_events = {"own": 0}


def signals():
    """A handler in Python every 3 ms, and one that does not raise for each of the usual signals."""
    for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGURG, signal.SIGCHLD):
        signal.signal(number, lambda *_: _events.update(own=_events["own"] + 1))
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)


def seccomp():
    """System calls that make, rename and remove files are refused."""
    refuse = 0x00050000 | 1  # SECCOMP_RET_ERRNO, EPERM
    lines = [(0x20, 0, 0, 0)]  # load the number of the call
    lines += [each for number in _SECCOMP_NUMBERS.values() for each in ((0x15, 0, 1, number), (0x06, 0, 0, refuse))]
    lines.append((0x06, 0, 0, 0x7FFF0000))
    code = b"".join(struct.pack("<HBBI", *line) for line in lines)
    held = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(lines), ctypes.addressof(held)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def faults():
    """A traceback of all threads is written every two seconds."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(2, repeat=True, file=Path(os.devnull).open("w"))  # noqa: SIM115


def forks():
    """A thread forks all the time."""

    def fork():
        while True:
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
            time.sleep(0.01)

    threading.Thread(target=fork, daemon=True).start()


def traced():
    """A trace function counts the lines of this file's training loop."""

    def trace(frame, event, _):
        if frame.f_code.co_name != "train":
            return None
        frame.f_trace_lines = False
        _events["own"] += event == "call"
        return trace

    sys.settrace(trace)


def stacks():
    """Eight threads wait on the smallest stacks that torch's own thread data leaves."""
    threading.stack_size(256 * 1024)
    for _ in range(8):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    threading.stack_size(0)


def memory():
    """Only 48 MiB of addresses are left."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (48 << 20), resource.RLIM_INFINITY))


def files():
    """No file can be opened."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    with contextlib.suppress(OSError):
        while True:
            _events.setdefault("open", []).append(os.dup(0))


def greenlets():
    """gevent has replaced the threads."""
    from gevent import monkey

    monkey.patch_all()


def frozen():
    """The collector's objects are frozen, models and all, once it trains."""


def train():
    import paced
    import torch
    from paced import digest, step
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(8):
        loss = nn.functional.cross_entropy(model(torch.randn(32, 16)), torch.randint(4, (32,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(number, repr(loss.item()), flush=True)
        if number == 2 and what in ("memory", "files", "seccomp"):
            paced.ready()
            paced._READY_AT = 0
            globals()[what]()
        if number == 1 and what == "frozen":
            __import__("gc").freeze()
        step()
    print(digest(model.parameters()), _events["own"] if what == "traced" else _events["own"] > 0, flush=True)


def deep(levels):
    """Trains where few calls are left before the recursion limit."""
    return deep(levels - 1) if levels else train()


what = sys.argv[1]
if what == "deep":
    import torch._dynamo  # noqa: F401 - imported by the first step, which has no room for it

    deep(sys.getrecursionlimit() - 120)
else:
    if what not in ("memory", "files", "seccomp", "plain"):
        globals()[what]()
    train()
signal.setitimer(signal.ITIMER_REAL, 0)
if what in ("files", "forks"):
    os._exit(0)
