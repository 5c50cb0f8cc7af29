"""Checks in processes of their own: what can be recorded with this Python's torch, and a job of a few lines."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
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
#: A Linear of 64 by 64 without bias: 16,384 bytes of parameters in float32, and as much of gradients.
#: On the GPU where there is one, whose memory is recorded by other means than the processor's.
_JOB = """import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(64, 64, bias=False, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad(set_to_none=False)
    model(torch.ones(8, 64, device=device)).sum().backward()
    optimizer.step()
"""
_BYTES = 64 * 64 * 4
_WHAT = "self-test"


def check_torch(*, builds: bool = False) -> tuple[list[Finding], dict[str, Any]]:
    """Finds torch, imports it in another process, and judges its capabilities.

    Args:
        builds: Build the listener for it first.

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
    probed, fault = _probe(*["--build"] * builds)
    if probed is None:
        return [
            Finding(
                FAIL,
                "torch",
                f"{version or 'some version'} is installed and cannot be imported: {fault}",
                "Fix it until python -c 'import torch' works, or reinstall it.",
            )
        ], {}
    return [_judge_version(probed), _judge_cpu(probed), _judge_listener(probed), *_judge_devices(probed)], probed


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None  # not installed, or copied without metadata


def _probe(*options: str) -> tuple[dict[str, Any] | None, str]:
    """Returns the probe's facts, or None and the last line of its error."""
    command = [sys.executable, str(_PROBE), str(_ROOT), *options]
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


def _judge_listener(probed: dict[str, Any]) -> Finding:
    if not probed["lacks_listener"]:
        return Finding(OK, "listener", "built: allocations are read from it, not from torch's profiler, at less cost")
    says = f"{probed['lacks_listener']}; allocations are read from torch's profiler, at more cost"
    advice = "Optional; build it with memprof doctor --build." if sys.platform == "linux" else ""
    return Finding(NOTE, "listener", says, advice)


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


def check_recording(folder: Path, environment: Mapping[str, str]) -> Finding:
    """Records the job in a separate process, and reads the recording.

    Args:
        folder: The output folder of recordings; the test recording is removed again.
        environment: The environment of this process; variables of other recordings are dropped.
    """
    own = {name: value for name, value in environment.items() if not name.startswith("MEMPROF_")}
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix=".memprof-doctor-", dir=folder) as place:
            (Path(place) / "job.py").write_text(_JOB, encoding="utf-8")
            # The nearest pyproject.toml belongs to the user's project: every setting is overridden here.
            words = ["--skip", "1", "--steps", "2", "-o", "run.memprof", "--no-dry-run", "job.py"]
            (Path(place) / "pyproject.toml").touch()
            recorded = _run(["record", *words], place, own)
            if recorded.returncode or not (Path(place) / "run.memprof").is_file():
                return _failed(f"a job of a few lines was not recorded: {_last(recorded)}")
            reported = _run(["report", "run.memprof", "--json"], place, own)
            if reported.returncode:
                return _failed(f"its recording could not be read: {_last(reported)}")
            report = json.loads(reported.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return _failed(f"a job of a few lines could not be recorded: {error}")
    return judge_report(report, time.monotonic() - start)


def judge_report(report: dict[str, Any], seconds: float) -> Finding:
    """Judges the output of ``memprof report --json`` for the job."""
    held = report["at_peak"]["by_category"]
    for category in ("parameter", "gradient"):
        if held.get(category, 0) != _BYTES:
            return _failed(f"the recording has {held.get(category, 0)} bytes of {category}s where the job has {_BYTES}")
    peak, where = format_bytes(report["peak"]["allocated_bytes"]), report["machine"]["device_name"]
    says = f"a job of a few lines was recorded on {where} and read, exact to the byte: {peak}, {seconds:.1f} s"
    return Finding(OK, _WHAT, says)


def _run(words: list[str], folder: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memprof", *words],
        cwd=folder,
        env={**environment, "PYTHONPATH": _with_memprof(environment)},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_LIMIT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def _with_memprof(environment: Mapping[str, str]) -> str:
    """Returns a PYTHONPATH on which this memprof is importable, wherever it was started from."""
    packages = {str(Path(__file__).resolve().parents[3]), *(path for path in sys.path if path.endswith("dashboard"))}
    known = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.pathsep.join([*known, *sorted(packages - set(known))])


def _failed(says: str) -> Finding:
    return Finding(FAIL, _WHAT, says, "MEMPROF_DEBUG=1 memprof record on a small script of yours shows more.")


def _last(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"it ended with {done.returncode}"
