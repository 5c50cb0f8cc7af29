"""Describes the recorded process for the manifest: its machine, and its rank in a distributed job.

A DataLoader's worker has no rank.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from memprof.recorder.clock import clock_ns
from memprof.recorder.steps.window import Window
from memprof.trace.files.spool import SPOOL_VERSION
from memprof.trace.launchers import rank_in
from memprof.trace.secrets import mask_words
from memprof.version import __version__

#: Bound at import: a job may replace the builtin and count its calls.
_open = open
#: oneDNN ISA levels that include fp16.
_WITH_FP16 = ("AVX512_CORE_FP16", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16", "AVX10_1_512", "AVX10_1_512_AMX")
#: oneDNN ISA levels that include AMX, besides no limit.
_WITH_AMX = ("", "ALL", "DEFAULT", "AVX512_CORE_AMX", "AVX512_CORE_AMX_FP16", "AVX10_1_512_AMX", "AVX10_1_512_AMX_FP16")


def describe_process(window: Window, *, is_late: bool) -> dict[str, Any]:
    """Returns the manifest's description of the process: versions, machine, rank, command line, window."""
    rank, world_size = find_rank(os.environ)
    return {
        "spool_version": SPOOL_VERSION,
        "memprof_version": __version__,
        "torch_version": str(torch.__version__),
        "python_version": platform.python_version(),
        "time_ns": clock_ns(),
        "pid": os.getpid(),
        "argv": list(mask_words(sys.argv)),  # fallback if the parent's own record of it is missing
        "rank": rank,
        "world_size": world_size,
        **describe_place(),
        "is_late": is_late,
        "window": {"skip": window.skip, "steps": window.steps, "stop": window.stop},
        "threads": torch.get_num_threads(),
        "machine": {
            "device_name": _processor(),
            "device_kind": "cpu",
            "cores": os.cpu_count() or 0,
            "memory_bytes": _memory_bytes(),
            "os": _system(),
            "allocator_settings": _allocator_settings(),
            "short_types": short_types(),
            "has_amx": has_amx(),
        },
    }


def short_types() -> list[str]:
    """Returns the types shorter than float32 in which oneDNN, torch's CPU backend, computes on this processor.

    Torch has operators that report this, but the job's own profilers and modes would see the calls. oneDNN's
    documentation ("CPU Dispatcher Control") lists the instructions required, and the variable that restricts them.
    """
    given = _field("flags", "Features")
    if given is None:
        return ["bfloat16"]
    limit = _isa_limit()
    flags = set(given.split())
    found = []
    if ("avx512bw" in flags and limit != "AVX" and not limit.startswith(("SSE", "AVX2"))) or "bf16" in flags:
        found.append("bfloat16")
    if "avx512_fp16" in flags and limit in ("", "ALL", "DEFAULT", *_WITH_FP16):
        found.append("float16")
    return found


def has_amx() -> bool:
    """Returns whether oneDNN multiplies bfloat16 in AMX tiles, for which its convolutions take other temporaries."""
    flags = (_field("flags") or "").split()
    return "amx_tile" in flags and "amx_bf16" in flags and _isa_limit() in _WITH_AMX


def _isa_limit() -> str:
    return (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()


def _allocator_settings() -> str:
    """Returns the job's caching allocator settings; the variable has its current name since torch 2.9."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


def _processor() -> str:
    return _field("model name") or platform.machine()  # platform.processor() would start a process inside the job


def _field(*names: str) -> str | None:
    """Returns the system's description of the processor under one of several names; None if there is none."""
    try:
        with _open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.partition(":")[0].strip() in names:
                    return line.partition(":")[2].strip()
    except OSError:
        return None
    return None


def _system() -> str:
    """Returns the system's name; platform.platform() would start a process inside the job."""
    if hasattr(os, "uname"):
        system = os.uname()
        return f"{system.sysname} {system.release}"
    return sys.platform


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def find_rank(environment: Mapping[str, str]) -> tuple[int, int]:
    """Returns the rank of this process and the world size; (0, 1) for a single-process job.

    The process group takes precedence over the environment: it is all that a script starting its own processes sets.
    """
    given = _of_process_group()
    return given if given is not None else rank_in(environment)


def is_loader_worker() -> bool:
    """Returns whether this process is a DataLoader's worker.

    Its modules are transforms of the data set, such as torchvision's, and are no model's.
    """
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def describe_place() -> dict[str, Any]:
    """Returns the machine's identity and the clock it uses."""
    return {"node": platform.node(), "clock": _clock()}


def _of_process_group() -> tuple[int, int] | None:
    distributed = sys.modules.get("torch.distributed")
    # A torch built without distributed support still has the module.
    if distributed is None or not getattr(distributed, "is_initialized", bool)():
        return None
    return int(distributed.get_rank()), int(distributed.get_world_size())


def _clock() -> str:
    """Identifies the running system, whose clock its containers share; the machine's name if unavailable."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()[:13]
    except (OSError, ValueError):
        return platform.node()
