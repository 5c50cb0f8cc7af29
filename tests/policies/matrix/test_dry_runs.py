"""A dry run fails where the real run fails: with the same sentence and the same status."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.policies.matrix.expected import LATE, REFUSALS

JOB = Path(__file__).with_name("job.py")

#: How the policies of the table are written on a command line.
FLAGS = {
    "accumulate": ("--accumulate", "2"),
    "checkpoint": ("--checkpoint", "layers.*"),
    "precision fp16": ("--precision", "fp16"),
    "optimizer in-backward": ("--optimizer", "in-backward"),
    "optimizer": ("--optimizer", "foreach"),
    "swap optimizer": ("--swap", "optimizer:disk"),
}
#: What depends on numbers, of which a dry run has none.
OF_NUMBERS = {"a_gradient_that_is_not_finite"}
#: Refused with another sentence where the plan is applied at the model's first call.
AS_A_SCRIPT = {
    ("accumulate", "per_sample_gradients"): r"accumulate needs an optimizer of the model's parameters",
    ("optimizer in-backward", "distributed_afterwards"): r"DistributedDataParallel",
}
ONE = [("optimizer in-backward", "clipping_by_norm"), ("accumulate", "clipping_by_hand")]
CASES = [(policy, usage) for policy, entries in REFUSALS.items() for usage in entries if usage not in LATE | OF_NUMBERS]


def refusal(folder: Path, policy: str, usage: str, *mode: str) -> str:
    """Records a job under a policy and returns the sentence with which it is refused."""
    command = [sys.executable, "-m", "memprof", "record", "-f", "-o", str(folder / "run.memprof"), *mode]
    done = subprocess.run(
        [*command, *FLAGS[policy], str(JOB), usage],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=300,
    )
    assert done.returncode == 125, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("memprof: ")]
    wanted = AS_A_SCRIPT.get((policy, usage), REFUSALS[policy][usage])
    found = next((line for line in lines if re.search(wanted, line)), "")
    assert found, done.stderr
    assert "Traceback" not in done.stderr
    return found


@pytest.mark.parametrize(("policy", "usage"), ONE)
def test_a_dry_run_is_refused_as_the_real_run(tmp_path: Path, policy: str, usage: str) -> None:
    """What the script does after backward is found on tensors without memory, too."""
    assert refusal(tmp_path, policy, usage, "--dry-run") == refusal(tmp_path, policy, usage)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "usage"), [case for case in CASES if case not in ONE])
def test_every_dry_run_is_refused_as_the_real_run(tmp_path: Path, policy: str, usage: str) -> None:
    """The same for every refusal of the matrix that the first step shows; a dry run refuses DDP of any kind."""
    dry, real = refusal(tmp_path, policy, usage, "--dry-run"), refusal(tmp_path, policy, usage)
    assert dry == real or usage == "distributed_afterwards"
