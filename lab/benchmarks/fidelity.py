"""Do recorded jobs compute bit-identical numbers?"""

from __future__ import annotations

import io
from pathlib import Path

import torch

from lab.benchmarks.recording import Job, run, sample
from lab.benchmarks.section import Section, verdict
from lab.zoo_catalog import CASES
from lab.zoo_runs import runs_of


def measure(folder: Path, *, quick: bool) -> Section:
    """Compares losses of the zoo, and losses and final parameters of the samples, bit by bit."""
    cases = CASES[::6] if quick else CASES
    runs = [runs_of(case, folder) for case in cases]
    outputs = sum(run.plain.stdout == run.recorded.stdout for run in runs)
    errors = sum(run.plain.stderr == run.recorded.stderr for run in runs)
    statuses = sum(run.plain.returncode == run.recorded.returncode for run in runs)
    samples = ("gpt", "resnet", "lstm")
    equal = [_is_equal(name, folder) for name in samples]
    rows = (
        ("zoo: losses printed in full, bit-equal", f"{outputs} of {len(runs)}"),
        ("zoo: stderr equal", f"{errors} of {len(runs)}"),
        ("zoo: exit status equal", f"{statuses} of {len(runs)}"),
        ("samples: losses bit-equal", f"{sum(losses for losses, _ in equal)} of {len(samples)}"),
        ("samples: final parameters bit-equal", f"{sum(parameters for _, parameters in equal)} of {len(samples)}"),
    )
    passed = all(first == last for first, _, last in (cell.partition(" of ") for _, cell in rows))
    return Section(
        "Fidelity",
        "Each script runs plain and under `memprof record`, on one thread.",
        ("compared", "equal"),
        rows,
        verdict("all equal", passed=passed),
    )


def _is_equal(name: str, folder: Path) -> tuple[bool, bool]:
    """Returns whether losses and whether final parameters are equal."""
    left, right = folder / f"{name}-plain.pt", folder / f"{name}-recorded.pt"
    plain = run(sample(name, "--save-final", str(left)).command, folder, OMP_NUM_THREADS="1")
    job: Job = sample(name, "--save-final", str(right))
    recorded = run(job.recorded(folder / "fidelity.memprof"), folder, OMP_NUM_THREADS="1")
    first, second = (torch.load(io.BytesIO(path.read_bytes()), weights_only=True) for path in (left, right))
    same = first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    return plain.stdout == recorded.stdout, same
