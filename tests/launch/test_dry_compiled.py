"""Plans that compile, found by dry runs: shares of the compiler's budget, their steps, and `suggest --compile`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.plans.basis import basis_of
from memprof.analysis.plans.compiled_steps import steps_of_compiled
from memprof.launch.dry.dry_compiled import _is_combinable, _shares
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.precision.policy import Precision
from memprof.policies.swap.policy import Swap
from memprof.trace.store import Trace
from tests.recorder.recorded import record

_MODELS = str(Path(__file__).parents[1] / "benchmarks" / "jobs" / "compiled.py")


@pytest.mark.parametrize(
    ("fits_below", "tried"),
    [
        (1.0, [1.0]),
        (0.6, [1.0, 0.5, 0.75, 0.62, 0.56]),
        (0.1, [1.0, 0.5, 0.25, 0.12, 0.06]),
        (-1.0, [1.0, 0.5, 0.25, 0.12, 0.06, 0.0]),
    ],
    ids=["all", "between", "low", "never"],
)
def test_shares_are_halved_towards_the_largest_that_fits(fits_below: float, tried: list[float]) -> None:
    """Down to 0 where none does."""
    shares = _shares()
    found = [next(shares)]
    try:
        while True:
            found.append(shares.send(found[-1] <= fits_below))
    except StopIteration:
        pass
    assert found == tried


@pytest.mark.parametrize(
    ("policy", "is_combinable"),
    [
        (Precision(), True),
        (OptimizerPolicy.from_flag("loop"), True),
        (Swap((".",), to="disk", what="optimizer"), True),
        (Swap(("layers.*",), to="disk"), False),
        (Checkpoint(("layers.*",)), False),
    ],
    ids=["precision", "optimizer", "swap optimizer", "swap activations", "checkpoint"],
)
def test_policies_that_leave_the_graph_as_it_is_are_combined_with_the_compiler(
    policy: Policy, is_combinable: bool
) -> None:
    """What is saved for backward is the compiler's choice."""
    assert _is_combinable(policy) is is_combinable


@pytest.mark.slow
def test_compiled_plans_are_found_without_a_recording_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The plan's peak is that of its dry run, within the budget in bytes; run for real, it takes what was predicted."""
    from memprof.cli.main import main

    monkeypatch.chdir(tmp_path)
    base = record(tmp_path, "--stop", _MODELS, "gpt", "--eager", name="run.memprof")
    budget = int(base.peak * 0.75)
    words = ["suggest", "run.memprof", "--budget", f"{budget}B", "--compile", "4", "--allow", "compile"]
    assert main([*words, "--json", "--write", "plan.toml"]) == 0
    result: dict[str, Any] = json.loads(capfd.readouterr().out)
    best = result["plans"][0]
    assert best["describe"].startswith("compile the whole model at 0.")
    assert best["peak_allocated_bytes"] <= budget
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("there is no C++ compiler")
    under = record(tmp_path, "--stop", "--plan", "plan.toml", _MODELS, "gpt", "--eager", name="under.memprof")
    assert under.peak == best["peak_allocated_bytes"]


@pytest.mark.slow
def test_times_are_those_of_the_recording(tmp_path: Path) -> None:
    """Products take as long as their operations did, and the same job, uncompiled, the time that it took."""
    base = record(tmp_path, "--stop", _MODELS, "gpt", "--eager", name="run.memprof")
    same = record(tmp_path, "--dry-run", "--skip", "2", "--steps", "3", _MODELS, "gpt", "--eager", name="same.memprof")
    basis = basis_of(Trace.open(base.path))
    found = steps_of_compiled(basis, Trace.open(same.path), Trace.open(base.path).manifest)
    assert found is not None
    assert found[0].duration_us == pytest.approx(basis.step.duration_us, rel=0.2)
    assert (found[0].ops.duration_us[found[0].ops.flops > 0] > 0).all()
