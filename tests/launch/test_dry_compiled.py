"""Plans that compile, found by dry runs: shares of the compiler's budget, their steps, and `suggest --compile`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.plans.basis import Basis, basis_of
from memprof.analysis.plans.frames import steps_of_frame
from memprof.analysis.plans.suggest import suggest
from memprof.launch.dry.dry_compiled import (
    _is_combinable,
    compiled_plans,
    compiles_itself,
    repeated_layers,
    short_precision,
)
from memprof.launch.dry.dry_outcome import DryOutcome
from memprof.launch.dry.job_server import DryRequest
from memprof.planners.search.request import SearchRequest
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.compile.policy import Compile
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.policies.swap.policy import Swap
from memprof.trace.store import Trace
from memprof.trace.usages import COMPILES_MODELS
from tests.recorder.recorded import record

_GPT = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"
_MODELS = str(Path(__file__).parents[2] / "lab" / "benchmarks" / "jobs" / "compiled.py")


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


def test_no_dry_run_starts_after_the_time_limit() -> None:
    """One may take minutes; the page says that the search ended."""
    opened = Trace.open(_GPT)
    basis = basis_of(opened)
    found = suggest(opened, basis, SearchRequest(basis.peak_bytes // 2, allow=("optimizer",), time_limit_s=5.0))
    runs: list[Plan] = []

    def run(requests: Sequence[DryRequest]) -> list[DryOutcome]:
        (request,) = requests
        assert request.plan is not None
        assert request.keep is not None
        runs.append(request.plan)
        shutil.copy(_GPT, request.keep)
        return [DryOutcome(basis.peak_bytes, "")]

    plans = compiled_plans(found, 6, run, lambda: bool(runs))
    assert len(runs) == 1
    assert plans.is_cut
    assert "--time-limit ended the search for compiled plans" in plans.warnings[-1]
    assert not compiled_plans(found, 6, run).is_cut


def _compiles_itself() -> tuple[Trace, Basis]:
    """Returns a recording, and what plans for it start from, as of a job that compiles its model itself."""
    opened = Trace.open(_GPT)
    basis = basis_of(opened)
    step = replace(basis.step, usages=frozenset({*basis.step.usages, COMPILES_MODELS}))
    return opened, replace(basis, step=step)


def test_shares_alone_are_left_out_where_what_is_kept_does_not_matter() -> None:
    """A job that compiles itself and has weights and optimizer state above the budget is dry-run in bf16 at once."""
    opened, compiled = _compiles_itself()
    runs: list[Plan] = []

    def run(requests: Sequence[DryRequest]) -> list[DryOutcome]:
        runs.extend(request.plan for request in requests if request.plan is not None)
        return [DryOutcome(None, "") for _ in requests]

    for share, kinds in ((0.9, {Compile}), (0.2, {Precision, Compile})):
        request = SearchRequest(int(compiled.peak_bytes * share), allow=("precision", "compile"), time_limit_s=5.0)
        found = suggest(opened, compiled, request)
        runs.clear()
        compiled_plans(found, 1, run)
        assert {type(policy) for policy in runs[0].policies} == kinds


def test_the_best_plan_of_a_job_that_compiles_itself_gets_a_share() -> None:
    """Its peak at the whole budget of the compiler is predicted, and no other precision needed."""
    opened, compiled = _compiles_itself()
    runs: list[Plan] = []

    def run(requests: Sequence[DryRequest]) -> list[DryOutcome]:
        (request,) = requests
        assert request.plan is not None
        assert request.keep is not None
        runs.append(request.plan)
        shutil.copy(_GPT, request.keep)
        return [DryOutcome(compiled.peak_bytes, "")]

    request = SearchRequest(int(compiled.peak_bytes * 0.9), allow=("swap", "precision", "compile"), time_limit_s=5.0)
    found = suggest(opened, compiled, request)
    compiled_plans(found, 1, run)
    swap, share = runs[1].policies
    assert swap == found.answer.least.policies[0]
    assert isinstance(share, Compile)
    assert share.activation_budget < 1
    assert not any("fusion" in policy.describe() for plan in runs for policy in plan.policies)
    newer = replace(found, manifest=replace(found.manifest, torch_version="2.15.0+cu132"))
    runs.clear()
    compiled_plans(newer, 1, run)
    assert Plan((swap, Compile(fusion_gb=0.0))) in runs


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
    found = steps_of_frame((), basis, Trace.open(same.path), Trace.open(base.path).manifest)
    assert found is not None
    assert found[0].duration_us == pytest.approx(basis.step.duration_us, rel=0.2)
    assert (found[0].ops.duration_us[found[0].ops.flops > 0] > 0).all()


_CARD = ("--dry-run", "--device", "h100-80g", "--skip", "1", "--steps", "1", "--stop")
_LAYERS = """
import sys, torch
from torch import nn
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)
    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))).sigmoid())
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
model = Model().cuda()
if len(sys.argv) > 1:
    model = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(16384, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


_SMALL = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
    def forward(self, x):
        return nn.functional.softplus((x * self.scale).sigmoid().tanh())
model = Model().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(65536, 64, device="cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_small_job_is_compiled_on_a_virtual_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With one dry run, the plan is listed with the peak of its generated code, which fuses what eager code saves."""
    from memprof.cli.main import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(_SMALL)
    assert record(tmp_path, *_CARD, "job.py", name="run.memprof").returncode == 0
    words = ["suggest", "run.memprof", "--budget", "80%", "--compile", "1", "--allow", "compile"]
    assert main([*words, "--machine", "h100-80g", "--json"]) == 0
    result: dict[str, Any] = json.loads(capfd.readouterr().out)
    best = result["plans"][0]
    assert best["describe"] == "compile the whole model"
    assert best["peak_interval_bytes"] == [best["peak_allocated_bytes"]] * 2
    assert best["peak_allocated_bytes"] <= result["budget_bytes"]


@pytest.fixture(scope="module")
def on_card(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job, and dry runs on a virtual GPU: eager, and compiled by the job itself."""
    folder = tmp_path_factory.mktemp("card")
    (folder / "job.py").write_text(_LAYERS)
    for name, words in (("eager", ()), ("own", ("compiled",))):
        ended = record(folder, *_CARD, "job.py", *words, name=f"{name}.memprof")
        assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.slow
def test_layers_and_precision_of_a_job_that_compiles_itself_are_known(on_card: Path) -> None:
    """By the names of its modules, whose calls inside are not recorded, and by the types of its products."""
    eager, own = (Trace.open(on_card / f"{name}.memprof").fullest_step() for name in ("eager", "own"))
    assert [compiles_itself(step) for step in (eager, own)] == [False, True]
    assert [repeated_layers(step) for step in (eager, own)] == [("layers.0", "layers.1", "layers.2")] * 2
    assert short_precision(own) == (Precision("bf16"),)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eager", "own"])
def test_compiled_plans_on_a_virtual_gpu_have_the_peak_of_their_dry_run(
    on_card: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """To the byte, and its time; a job that compiles its model gets budgets of its own regions, and layers inside."""
    from memprof.cli.main import main

    monkeypatch.chdir(on_card)
    more = ("--allow", "checkpoint") if kind == "own" else ("--machine", "h100-80g")
    words = ["suggest", f"{kind}.memprof", "--budget", "85%", "--compile", "2", "--allow", "compile", *more]
    assert main([*words, "--json", "--write", f"{kind}.toml", "--force"]) == 0
    result: dict[str, Any] = json.loads(capfd.readouterr().out)
    best = result["plans"][0]
    assert "compile the whole model" in best["describe"]
    least, most = best["peak_interval_bytes"]
    assert least == best["peak_allocated_bytes"] == most <= result["budget_bytes"]
    words = ["compiled"] if kind == "own" else []
    under = record(on_card, *_CARD, "--plan", f"{kind}.toml", "job.py", *words, name="under.memprof")
    assert under.peak == best["peak_allocated_bytes"]
    assert under.trace.fullest_step().duration_us == pytest.approx(best["step_time_us"], rel=1e-6)
