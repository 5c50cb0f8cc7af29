"""Runs a script under torch's own memory history and writes the snapshot: SNAPSHOT SCRIPT [ARGS].

The last line on stdout is JSON: the allocator's peaks over the whole run, and what the process takes of the device.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch


def process_bytes():
    """Returns what NVIDIA's driver counts for this process, None where it does not say."""
    try:
        import pynvml
    except ImportError:
        return None
    pynvml.nvmlInit()
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    return next((one.usedGpuMemory for one in running if one.pid == os.getpid()), None)


snapshot, script, *arguments = sys.argv[1:]
torch.cuda.init()  # before, there is no device's allocator whose history could be kept
torch.cuda.memory._record_memory_history(stacks="python", max_entries=2_000_000)
sys.argv = [script, *arguments]
sys.path[0] = str(Path(script).resolve().parent)
try:
    runpy.run_path(script, run_name="__main__")
finally:
    torch.cuda.memory._dump_snapshot(snapshot)
stats = torch.cuda.memory_stats()
print(
    json.dumps(
        {
            "allocated_bytes": stats["allocated_bytes.all.peak"],
            "reserved_bytes": stats["reserved_bytes.all.peak"],
            "reserved_end_bytes": stats["reserved_bytes.all.current"],
            "process_bytes": process_bytes(),
        }
    ),
    flush=True,
)
