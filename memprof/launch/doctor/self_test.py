"""Records a job of a few lines, and checks that the recording contains the expected bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memprof.launch.doctor.findings import FAIL, OK, Finding
from memprof.units import format_bytes

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
_LIMIT_S = 300
_WHAT = "self-test"


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
    """Judges the output of ``memprof report --json`` for the job.

    Args:
        report: The report.
        seconds: Time to record and read, in seconds.
    """
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
