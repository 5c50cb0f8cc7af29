"""A job on two processes of this machine, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_on_two_ranks(folder: Path, job: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Writes a job into a folder and runs it there to its end, on one thread each and under none of our settings.

    Args:
        folder: The working folder.
        job: The script.
        words: Its arguments.
    """
    (folder / "job.py").write_text(job)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d"]
    done = subprocess.run(
        [sys.executable, *launch, "--rdzv_endpoint", "localhost:0", "job.py", *words],
        cwd=folder,
        env={**{name: value for name, value in os.environ.items() if "MEMPROF" not in name}, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done
