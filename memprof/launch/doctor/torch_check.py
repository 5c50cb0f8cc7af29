"""Probes this Python's torch, in a separate process, for what can be recorded with it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from memprof.launch.doctor.findings import FAIL, FIX, NOTE, OK, Finding
from memprof.launch.torch_versions import NEWEST, OLDEST, as_numbers
from memprof.units import format_bytes

_INSTALL = "pip install 'torch-memprof[torch]'"
_PROBE = Path(__file__).with_name("torch_probe.py")
_ROOT = Path(__file__).resolve().parents[3]
_LIMIT_S = 300
_DRIVER = Path("/proc/driver/nvidia/version")


def check_torch() -> tuple[list[Finding], dict[str, Any]]:
    """Finds torch, imports it in another process, and judges its capabilities.

    Returns:
        The findings, and the probe's facts about torch, empty if it could not be probed.
    """
    version = _installed_version()
    if version is None and importlib.util.find_spec("torch") is None:
        return [
            Finding(
                FAIL,
                "torch",
                f"not installed for {sys.executable}",
                f"Install it with {_INSTALL}; reports, suggestions and diffs work without, and a job of another "
                "Python is recorded with: memprof record -- /path/to/python train.py.",
            )
        ], {}
    if version is not None and as_numbers(version) < as_numbers(OLDEST):
        return [Finding(FAIL, "torch", f"{version} is too old", f"Install torch {OLDEST} or newer: {_INSTALL}.")], {
            "version": version
        }
    probed, fault = _probe()
    if probed is None:
        return [
            Finding(
                FAIL,
                "torch",
                f"{version or 'some version'} is installed and cannot be imported: {fault}",
                "Fix it until python -c 'import torch' works, or reinstall it.",
            )
        ], {}
    return [_judge_version(probed), _judge_cpu(probed), *_judge_devices(probed)], probed


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None  # not installed, or copied without metadata


def _probe() -> tuple[dict[str, Any] | None, str]:
    """Returns the probe's facts, or None and the last line of its error."""
    command = [sys.executable, str(_PROBE), str(_ROOT)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"its import took more than {_LIMIT_S} seconds"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    last = lines[-1] if lines else ""
    if done.returncode:
        ended = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        return None, last or f"its import ended Python with {ended}"
    try:
        probed = json.loads(last)
    except ValueError:
        return None, "its import ended Python without any output"
    return (probed, "") if isinstance(probed, dict) else (None, "the probe returned nothing")


def _judge_version(probed: dict[str, Any]) -> Finding:
    version = probed["version"]
    if as_numbers(version) < as_numbers(OLDEST):
        return Finding(FAIL, "torch", f"{version} is too old", f"Install torch {OLDEST} or newer: {_INSTALL}.")
    if as_numbers(version) > as_numbers(NEWEST):
        return Finding(NOTE, "torch", f"{version}, newer than {NEWEST}, the newest that memprof is tested with")
    return Finding(OK, "torch", f"{version}, which is supported ({OLDEST} to {NEWEST})")


def _judge_cpu(probed: dict[str, Any]) -> Finding:
    if probed["hears_events"] and probed["keeps_blocks"]:
        return Finding(OK, "CPU memory", "every allocation, by torch's own allocator (cpu-native)")
    lacks = "the profiler's events" if not probed["hears_events"] else "the allocator's table of blocks"
    return Finding(
        NOTE,
        "CPU memory",
        f"storages one by one: this torch was built without {lacks}, so kernel workspaces are not recorded",
        "An official build of torch records every allocation.",
    )


def _judge_devices(probed: dict[str, Any]) -> list[Finding]:
    platform = "ROCm" if probed["hip_build"] else "CUDA"
    build = probed["hip_build"] or probed["cuda_build"]
    if probed["has_cuda"]:
        driver = f", driver {probed['driver']}" if probed["driver"] else ""
        seen = "every block, and the allocator's history" if probed["keeps_history"] else "blocks without a history"
        return [
            Finding(OK, f"cuda:{number}", f"{one['name']}, {format_bytes(one['total_bytes'])}; {seen}{driver}")
            for number, one in enumerate(probed["devices"])
        ]
    others = [
        Finding(NOTE, "XPU", "storages one by one; its allocator's history is not read") if probed["has_xpu"] else None,
        Finding(NOTE, "MPS", "storages one by one; kernels' temporaries are not seen") if probed["has_mps"] else None,
    ]
    found = [finding for finding in others if finding is not None]
    if found:
        return found
    if not build:
        advice = "Install a build of torch for CUDA to use it." if _DRIVER.exists() else ""
        says = "no: this torch is built for the CPU" + (", and the machine has an NVIDIA driver" if advice else "")
        return [Finding(FIX if advice else NOTE, "GPU", says, advice)]
    if not _DRIVER.exists() and not probed["hip_build"]:
        return [
            Finding(
                NOTE, "GPU", f"none: torch is built for {platform} {build}, and the machine has no driver for NVIDIA's"
            )
        ]
    return [
        Finding(
            FIX,
            "GPU",
            f"torch is built for {platform} {build} and finds no device",
            "Check that the driver is new enough for that version and that CUDA_VISIBLE_DEVICES hides none.",
        )
    ]
