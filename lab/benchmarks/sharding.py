"""Does each rank of a sharded job need the memory predicted from one rank's recording, with equal losses?"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.benchmarks.section import Section, verdict
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.shard.policy import Shard
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "tests" / "policies" / "jobs"
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
#: Jobs, and the modules that are checkpointed.
JOBS = {"gpt": "layers.*", "resnet": "stages.*"}
_LOSS = re.compile(r"step (\d+) loss ([0-9.]+)")  # the lines of two ranks may run into one another


@dataclass(frozen=True)
class _Run:
    """One job on some ranks.

    Attributes:
        step: The steady step of the rank with the highest peak.
        peak: That peak.
        losses: For each step, the sum of the ranks' printed losses.
    """

    step: Step
    peak: int
    losses: tuple[float, ...]


def measure(folder: Path, *, quick: bool) -> Section:
    """Runs every strategy on 2 and 4 gloo processes, with and without checkpoints, and compares with its prediction."""
    rows, worst = [], 0.0
    jobs = dict(list(JOBS.items())[:1]) if quick else JOBS
    for job, layers in jobs.items():
        base = _run(job, folder, 1)
        for ranks in (2,) if quick else (2, 4):
            for checkpoint in (False,) if quick else (False, True):
                more = (Checkpoint((layers,)),) if checkpoint else ()
                reference: tuple[float, ...] = ()
                for stage, strategy in enumerate(STRATEGIES):
                    flags = ("--shard", f"{strategy}:{ranks}", *(("--checkpoint", layers) if checkpoint else ()))
                    run = _run(job, folder, ranks, *flags)
                    reference = reference or run.losses
                    assert run.losses, "the job printed no loss"
                    start = time.perf_counter()
                    predicted = Plan((Shard(stage, ranks), *more)).transform(base.step)
                    seconds = time.perf_counter() - start
                    peak = int(live_bytes(predicted).during.max())
                    error = (peak - run.peak) / run.peak
                    worst = max(worst, abs(error))
                    drift = max(abs(np.array(run.losses) - np.array(reference)), default=0.0) / ranks
                    title = f"{job}, {strategy} over {ranks}{', ' + layers + ' checkpointed' if checkpoint else ''}"
                    rows.append(
                        (
                            title,
                            f"{peak:,}",
                            f"{run.peak:,}",
                            f"{error:+.3%}",
                            f"{drift:.1e}",
                            f"{seconds * 1e3:.0f} ms",
                        )
                    )
    rows += _tracked(folder)
    return Section(
        "Sharding",
        "One rank's peak, predicted from a recording of one process, against the highest rank's of real gloo processes "
        "(`memprof record --shard`, scripts without code for ranks), in bytes; losses compared with those of ddp on "
        "the same ranks, the largest difference of the mean; and the time of the prediction. The last row is torch's "
        "own "
        "FSDPMemTracker with a fake process group, on the same GPT and against the same measurement.",
        ("job", "predicted", "measured", "error", "losses", "took"),
        tuple(rows),
        verdict(f"every peak within 3 % (the worst: {worst:.3%})", passed=worst <= 0.03),
    )


def _run(job: str, folder: Path, ranks: int, *flags: str) -> _Run:
    path = folder / f"{job}.memprof"
    command = (sys.executable, "-m", "memprof", "record", "-f", "-o", str(path), *flags)
    # The job's loader has eight batches, of which each rank takes its share.
    done = subprocess.run(
        (*command, "--skip", "0", "--steps", "2", "-m", job)
        if ranks > 2
        else (*command, "--skip", "1", "--steps", "2", "-m", job),
        cwd=JOBS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    steps = [Trace.open(path, rank).steady_step() for rank in range(ranks)]
    peaks = [int(live_bytes(step).during.max()) for step in steps]
    losses: dict[int, float] = {}
    for number, loss in _LOSS.findall(done.stdout):
        losses[int(number)] = losses.get(int(number), 0.0) + float(loss)
    return _Run(steps[int(np.argmax(peaks))], max(peaks), tuple(losses[number] for number in sorted(losses)))


def _tracked(folder: Path) -> list[tuple[str, ...]]:
    """Compares with torch's own tracker."""
    measured = _run("gpt", folder, 2, "--shard", "fsdp:2").peak
    done = subprocess.run(
        (sys.executable, "-m", "lab.benchmarks.jobs.fsdp_tracked"),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no word"])[-1]
        return [("FSDPMemTracker, gpt, fsdp over 2", f"it failed: {reason[:80]}", "", "", "", "")]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    error = (found["peak"] - measured) / measured
    return [
        (
            "FSDPMemTracker, gpt, fsdp over 2",
            f"{found['peak']:,}",
            f"{measured:,}",
            f"{error:+.3%}",
            "",
            f"{found['seconds'] * 1e3:.0f} ms",
        )
    ]
