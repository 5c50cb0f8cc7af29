"""Unmodified scripts with third-party libraries: recorded, reported, planned for, trained under the plan, compared."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from memprof.analysis.plans.basis import basis_of
from memprof.analysis.plans.suggest import Suggestion, suggest
from memprof.analysis.plans.verify import describe_short, verify_plan
from memprof.launch.fit.request import measure
from memprof.planners.search.request import SearchRequest
from memprof.policies.plan.plan_file import read_plan, write_plan
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace

SCRIPTS = Path(__file__).parents[2] / "lab" / "real" / "scripts"


@dataclass(frozen=True)
class Case:
    """A script.

    Attributes:
        name: Its file, without the ending.
        library: What it needs.
        model: Type of the model that the plan is for.
        share: Budget, as a share of its peak.
        is_slow: Excluded from the main run, as others cover the same.
        has_gpu: Whether it trains on a GPU where ON_GPU is set.
    """

    name: str
    library: str
    model: str
    share: float = 0.75
    is_slow: bool = False
    has_gpu: bool = False


CASES = (
    Case("hf_gpt2", "transformers", "GPT2LMHeadModel", has_gpu=True),
    Case("hf_bert", "transformers", "BertForSequenceClassification", is_slow=True, has_gpu=True),
    Case("hf_llama", "transformers", "LlamaForCausalLM", is_slow=True),
    # Its validation, recorded after the window, takes 76 %.
    Case("lightning_net", "lightning", "Net", share=0.8, has_gpu=True),
    Case("accelerate_loop", "accelerate", "Sequential", has_gpu=True),
    Case("x_transformer", "x_transformers", "AutoregressiveWrapper", is_slow=True),
    Case("graph_net", "torch_geometric", "Net"),
)


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "memprof", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


def param(case: Case) -> object:
    missing = find_spec(case.library) is None
    marks = [pytest.mark.skipif(missing, reason=f"{case.library} is not installed")]
    return pytest.param(case, id=case.name, marks=[*marks, *([pytest.mark.slow] if case.is_slow else [])])


@pytest.fixture(scope="module", params=[param(case) for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the script was recorded; the callback's own recording is beside that where the script has one."""
    made = tmp_path_factory.mktemp(case.name)
    done = run(made, "record", "-o", "run.memprof", str(SCRIPTS / f"{case.name}.py"))
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def found(case: Case, folder: Path) -> Suggestion:
    """What a search with exact and modelled policies came to."""
    trace = Trace.open(folder / "run.memprof")
    search_request = SearchRequest(
        int(case.share * measure(trace).peak_bytes), allow=("checkpoint", "accumulate"), time_limit_s=10
    )
    return suggest(trace, basis_of(trace), search_request)


def test_script_is_recorded_as_it_is(case: Case, folder: Path) -> None:
    """Three sound steps, with forward, backward and update, of the model that the script trains; larger ones follow."""
    trace = Trace.open(folder / "run.memprof")
    window = trace.recorded_steps[:3]
    assert window == (2, 3, 4)
    assert trace.manifest.capture.is_complete
    for number in window:
        step = trace.step(number)
        step.check()
        assert {"forward", "backward", "optimizer"} <= set(step.ops.phase)
    report = run(folder, "report", "run.memprof")
    assert report.returncode == 0, report.stderr
    assert case.model in report.stdout


@pytest.mark.parametrize("case", [param(case) for case in CASES if case.has_gpu], indirect=True)
def test_script_is_dry_run_on_a_card(case: Case, folder: Path) -> None:
    """The library finds the virtual card, trains on it, and the model's weights lie there."""
    words = ("record", "--dry-run", "--device", "rtx4090", "-o", "card.memprof", str(SCRIPTS / f"{case.name}.py"))
    done = run(folder, *words, ON_GPU="1")
    assert done.returncode == 0, done.stderr
    assert "Fits on RTX 4090" in done.stderr
    step = Trace.open(folder / "card.memprof").fullest_step()
    step.check()
    assert {"forward", "backward", "optimizer"} <= set(step.ops.phase)
    is_weight = step.storages.category == "parameter"
    assert is_weight.any()
    assert set(step.storages.device[is_weight]) == {"cuda:0"}


def training_peak(trace: Trace) -> int:
    """Returns the peak of training; an evaluation comes earlier in the window, or is recorded after it by itself."""
    steps = [trace.step(number) for number in trace.recorded_steps]
    return max(int(live_bytes(step).during[step.ops.phase != "evaluation"].max(initial=0)) for step in steps)


def test_plan_is_found_and_met(case: Case, folder: Path, found: Suggestion) -> None:
    """A plan within the budget is found; trained under it, the script stays within, and below the upper end."""
    best = found.answer.best
    assert best is not None
    plan = found.predicted(best)
    assert plan.prediction is not None
    assert plan.prediction.model == case.model
    write_plan(folder / "plan.toml", plan)
    script = str(SCRIPTS / f"{case.name}.py")
    done = run(folder, "record", "--plan", "plan.toml", "-o", "under.memprof", script)
    assert done.returncode == 0, done.stderr
    under = Trace.open(folder / "under.memprof")
    measured = training_peak(under)
    compared = describe_short(verify_plan(read_plan(folder / "plan.toml"), under))
    interval = plan.prediction.interval
    assert interval is not None
    assert measured <= interval.most_bytes, compared
    assert measured >= 0.9 * plan.prediction.peak_allocated_bytes, compared
    assert measured <= found.answer.search_request.budget_bytes


@pytest.mark.parametrize("case", [param(CASES[0])], indirect=True)
def test_callback_sees_what_memprof_record_sees(folder: Path) -> None:
    """The peak of every step that the callback records is that of the same script under memprof record."""
    command = [sys.executable, str(SCRIPTS / "hf_gpt2.py")]
    environment = {**os.environ, "CALLBACK": "inside.memprof", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    inside, outside = (Trace.open(folder / f"{name}.memprof") for name in ("inside", "run"))
    assert inside.recorded_steps == outside.recorded_steps

    def peaks(trace: Trace) -> list[int]:
        return [int(live_bytes(trace.step(number)).during.max()) for number in trace.recorded_steps]

    assert peaks(inside) == peaks(outside)
