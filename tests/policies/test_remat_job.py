"""From the command line: a job that does not fit its budget with checkpointing trains within it under --remat."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.replay.live import live_bytes
from memprof.trace.store import Trace

SCRIPT = Path(__file__).parent / "jobs" / "unet.py"


def memprof(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memprof", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )


def record(folder: Path, name: str, *flags: str) -> str:
    done = memprof(folder, "record", "-q", "-o", name, *flags, str(SCRIPT), "--steps", "6")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_unet_trains_within_what_checkpointing_its_blocks_does_not_reach(tmp_path: Path) -> None:
    """At 60 % of the peak the gate fails under checkpointing, and passes under remat with the plain losses."""
    plain = record(tmp_path, "plain.memprof")
    budget = str(int(live_bytes(Trace.open(tmp_path / "plain.memprof").steady_step()).during.max() * 0.6))
    record(tmp_path, "checkpointed.memprof", "--checkpoint", "down.*,up.*,widen.*,predict")
    within = record(tmp_path, "within.memprof", "--remat", budget)
    assert memprof(tmp_path, "diff", "checkpointed.memprof", "--budget", budget).returncode == 4
    assert memprof(tmp_path, "diff", "within.memprof", "--budget", budget).returncode == 0
    assert within == plain
    ops = Trace.open(tmp_path / "within.memprof").steady_step().ops
    again = ops.name[ops.is_recompute].tolist()
    assert "aten.native_batch_norm.default" in again
    assert set(ops.phase[ops.is_recompute]) == {"backward"}
