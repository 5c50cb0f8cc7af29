"""Describes the machine of the figures; runs in its own process, so that no other process uses the device."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from lab.gpu.running import environment

ROOT = Path(__file__).resolve().parents[2]
_DRIVER = Path("/proc/driver/nvidia/version")


def ask_machine(device: str) -> dict[str, object]:
    """Returns the device, its memory, driver, CUDA, torch and Python; ``error`` where torch cannot be asked."""
    command = [sys.executable, "-m", "lab.gpu.machine", device]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["torch could not be asked"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def describe(device: str) -> dict[str, object]:
    """Describes this process's machine."""
    import torch

    has_cuda = torch.cuda.is_available()
    found: dict[str, object] = {
        "device": platform.processor() or platform.machine(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "driver": "",
        "cuda": torch.version.cuda or "",
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cores": os.cpu_count() or 0,
        "has_cuda": has_cuda,
    }
    if device == "cuda" and has_cuda:
        properties = torch.cuda.get_device_properties(0)
        found |= {"device": properties.name, "memory_bytes": properties.total_memory, "driver": _driver()}
    return found


def _driver() -> str:
    """Returns the version of NVIDIA's kernel driver, "" where it is not reported."""
    if _DRIVER.exists():
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([0-9.]+)", _DRIVER.read_text())
        if match:
            return match[1]
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
