"""Describes the machine the figures were measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil

from memprof.units import format_bytes


def describe_machine() -> str:
    """Returns one paragraph: processor, cores, memory, system and versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{_processor()}, {cores} cores, {format_bytes(psutil.virtual_memory().total)} of memory, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, torch {version('torch')}."
    )


def describe_load() -> str:
    """Returns one sentence on how busy the machine is: the load average of the last minute and the number of cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"Load average when timing began: {os.getloadavg()[0]:.1f} on {cores} cores."


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
