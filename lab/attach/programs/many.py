"""Holds many live tensors and waits: many.py COUNT SECONDS.

Every two seconds it prints its memory and the longest pause since: what attaches cost it and leave behind.
"""

import ctypes
import gc
import sys
import time
from pathlib import Path

import torch
from paced import ready
from torch import nn


class _Info(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def memory():
    """Returns bytes in use in the C heap, resident bytes, and the number of Python objects."""
    info = ctypes.CDLL(None).mallinfo2
    info.restype = _Info
    found = info()
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    return found.uordblks + found.hblkhd, resident, len(gc.get_objects()), sys.getallocatedblocks()


torch.manual_seed(3)
model = nn.Sequential(
    *[nn.Linear(16, 16) for _ in range(int(sys.argv[1]) // 10)]
)  # 2 parameters, 2 gradients, 6 states
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(4, 16)).sum().backward()
optimizer.step()
ready()
end = time.monotonic() + float(sys.argv[2])
before, longest = time.monotonic(), 0.0
last = 0.0
while time.monotonic() < end:
    time.sleep(0.001)
    now = time.monotonic()
    longest = max(longest, now - before)
    if now - last > 2:
        print(*memory(), f"{1e3 * longest:.0f} ms", flush=True)
        longest, last = 0.0, time.monotonic()
    before = time.monotonic()
