"""Plans put together on the page, and what is dry-run of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from plotly.utils import PlotlyJSONEncoder

from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.predict import forecast
from memprof.errors import PolicyError
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import format_plan, parse_plan
from memprof.policies.precision.policy import Precision
from memprof.trace.store import Trace
from memprof_dashboard.rank import Rank
from memprof_dashboard.sources import Workspace, open_sources
from memprof_dashboard.state import View
from memprof_dashboard.views.timelines import main_timeline
from memprof_dashboard.whatif.draft import _basis, draft_of, offer_of, predicted_line
from memprof_dashboard.whatif.draft_page import _result
from memprof_dashboard.whatif.dry_frames import DryFrames
from memprof_dashboard.whatif.plan_parts import command_of
from memprof_dashboard.whatif.planning import SearchForm, basis_for, find_plans
from tests.building import Op, Storage, make_trace

pytest.importorskip("dash")


GPT = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"


NONE = DryFrames(may_run=False)


@pytest.fixture(scope="module")
def rank() -> Rank:
    """The recorded GPT."""
    return Rank(Trace.open(GPT))


def test_offers_repeated_layers_and_each_of_them(rank: Rank) -> None:
    """Policies for the whole step by their description; modules by pattern, with their number, and one by one."""
    offer = offer_of(rank)
    assert "precision bf16" in offer.settings
    modules = offer.choices["checkpoint"].modules
    assert modules["layers.*"] == "layers.* (4)"
    assert [name for name in modules if name.startswith("layers.") and name.count(".") == 1 and "*" not in name] == [
        f"layers.{number}" for number in range(4)
    ]


def test_text_and_choice_are_one(rank: Rank) -> None:
    """What is ticked is what the address holds, in one order, and comes back; names that are not offered do not."""
    offer = offer_of(rank)
    text = offer.text_of(["precision bf16", "sell the house"], {"checkpoint": ["layers.1", "layers.0", "attic"]})
    assert text == "precision bf16;checkpoint=layers.0,layers.1"
    assert offer.chosen_in(text) == (["precision bf16"], {"checkpoint": ["layers.0", "layers.1"]})
    assert offer.text_of(*offer.chosen_in(text)) == text
    assert [policy.name for policy in offer.policies_of(text)] == ["precision", "checkpoint"]


def test_draft_is_the_prediction_of_predict(rank: Rank) -> None:
    """A ticked policy has the peak and the step time that `memprof predict` gives it."""
    made, expected = (
        draft_of(rank, "checkpoint=layers.*", NONE),
        forecast(rank.trace, Plan((Checkpoint(("layers.*",)),))),
    )
    assert made is not None
    assert made.predicted.peak.allocated_bytes == expected.predicted.peak.allocated_bytes
    assert made.predicted.step_time_us == expected.predicted.step_time_us
    assert draft_of(rank, "", NONE) is None


@pytest.mark.parametrize("text", ["checkpoint=attic", "nonsense", "checkpoint=", "precision bf16;precision bf16"])
def test_text_that_cannot_be_chosen_is_refused(rank: Rank, text: str) -> None:
    """An address may be made by anybody."""
    with pytest.raises(PolicyError, match="not one that can be chosen"):
        draft_of(rank, text, NONE)


def test_predicted_line_lies_on_its_step(rank: Rank) -> None:
    """It begins and ends with the recorded step, never runs back, and peaks as predicted."""
    made = draft_of(rank, "checkpoint=layers.*", NONE)
    assert made is not None
    edges, during = predicted_line(rank, made)
    assert (edges[0], edges[-1]) == rank.step_range(made.step.number)
    assert (np.diff(edges) >= 0).all()
    assert int(during.max()) == made.predicted.peak.allocated_bytes


def test_timeline_draws_the_plan_of_its_step_alone() -> None:
    """The line is there where its step is shown, and an address with a plan that is not offered has none."""
    workspace = Workspace(open_sources([GPT]))
    first, end = workspace.rank(0, -1).step_range(4)
    view = View(plan="checkpoint=layers.*")
    names = {line["name"] for line in main_timeline(workspace, view, -1, "light").data}
    assert "with the plan" in names
    for other in (view.change(first=0, end=first), View(plan="checkpoint=attic")):
        assert "with the plan" not in {line["name"] for line in main_timeline(workspace, other, -1, "light").data}
    (line,) = (
        one
        for one in main_timeline(workspace, view.change(first=0, end=end), -1, "light").data
        if one["name"] == "with the plan"
    )
    assert float(line["x"][0]) >= first


def test_of_many_steps_the_fullest_is_predicted() -> None:
    """A tick is answered at once; the page says that the other steps are left out."""
    steps = [[Op(makes=[f"a{step}"]), Op("aten.mm.default", "backward", frees=[f"a{step}"])] for step in range(20)]
    many = Rank(make_trace(steps, [Storage(f"a{step}", 8 + step) for step in range(20)]))
    basis = _basis(many)
    assert (basis.step.number, basis.others) == (19, ())
    assert "step 19 alone" in basis.warnings[-1]


def test_result_shows_both_peaks_and_the_command(rank: Rank) -> None:
    """Peak, step time and budget in words; the command is what a click copies."""
    made = draft_of(rank, "checkpoint=layers.*", NONE)
    assert made is not None

    def text_at(budget: str, *, counts_reserved: bool = False) -> str:
        return json.dumps(_result(made, View(budget=budget), counts_reserved=counts_reserved), cls=PlotlyJSONEncoder)

    fits = "fits the budget of 53.35 MiB, 15.66 MiB to spare"
    for expected in ("88.92 MiB", fits, "peak allocated", "step time"):
        assert expected in text_at("60%")
    assert "over the budget of 8.89 MiB by 28.80 MiB" in text_at("10%")
    button = command_of("save", ["memprof record --plan plan.toml train.py"])[1].children[0]
    assert getattr(button, "data-copy") == "memprof record --plan plan.toml train.py"


def test_saved_plan_reads_back(rank: Rank) -> None:
    """What the button downloads is the plan that was ticked, with its prediction."""
    made = draft_of(rank, "precision bf16;checkpoint=layers.0", NONE)
    assert made is not None
    plan = parse_plan(format_plan(made.plan), "plan.toml")
    assert plan.policies == made.plan.policies
    assert plan.prediction is not None


JOB = """
import torch
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    loss = model(torch.randn(2048, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def recorded_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """A recording that this user made in the current folder."""
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(JOB)
    run("record", "-q", "-o", "run.memprof", "train.py")
    return Rank(Trace.open("run.memprof"))


def run(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "memprof", *words], check=True, capture_output=True, timeout=240)


def peak_of(recorded_here: Rank, plan: Plan, basis: Basis | None = None) -> int:
    return forecast(recorded_here.trace, plan, basis).predicted.peak.allocated_bytes


def test_estimates_give_way_to_dry_runs(recorded_here: Rank) -> None:
    """The first answer is an estimate; the next peaks where a run under the plan does, with other policies on top."""
    dry_frames, plan = DryFrames(may_run=True), Plan((Precision(),))
    first = draft_of(recorded_here, "precision bf16", dry_frames)
    assert first is not None
    assert any("precision bf16 is estimated: a dry run of the job is under way" in text for text in first.warnings)
    assert dry_frames.is_running
    basis, why = dry_frames.basis(recorded_here, basis_for(recorded_here), plan, waits=True)
    assert why == ""
    assert (dry_frames.finished, dry_frames.is_running) == (1, False)
    made = draft_of(recorded_here, "precision bf16", dry_frames)
    assert made is not None
    assert [stage.how for stage in made.stages] == ["dry-run"]
    assert not any("estimated" in text for text in made.warnings)
    run("record", "-q", "-o", "bf16.memprof", "--precision", "bf16", "train.py")
    real = max(Trace.open("bf16.memprof").step_peaks().values())
    assert made.predicted.peak.allocated_bytes == peak_of(recorded_here, plan, basis) == real
    both = Plan((Precision(), Checkpoint(("0", "1"))))
    run(
        "record",
        "-q",
        "-o",
        "both.memprof",
        "--precision",
        "bf16",
        "--checkpoint",
        "0",
        "--checkpoint",
        "1",
        "train.py",
    )
    assert peak_of(recorded_here, both, basis) == max(Trace.open("both.memprof").step_peaks().values())
    assert dry_frames.finished == 1


def test_searches_continue_from_dry_runs(recorded_here: Rank) -> None:
    """A plan with bf16 that fits has the peak of its dry run, and no error of an estimate."""
    found = find_plans(recorded_here, SearchForm("80%", ("precision",)), DryFrames(may_run=True), lambda _: None)
    assert found.answer.best is not None
    assert found.answer.best.policies == (Precision(),)
    assert found.answer.best.interval.is_exact
    assert found.source_of(found.answer.best) == "dry-run"


@pytest.mark.parametrize("change", ["edited", "closed"])
def test_nothing_runs_otherwise(recorded_here: Rank, change: str) -> None:
    """Of a script that was edited, the reason is that of predict; a dashboard that may run nothing estimates."""
    dry_frames = DryFrames(may_run=change != "closed")
    if change == "edited":
        Path("train.py").write_text(f"{JOB}# edited\n")
    basis, why = dry_frames.basis(recorded_here, basis_for(recorded_here), Plan((Precision(),)), waits=True)
    assert not basis.dry_steps
    assert ("train.py has changed since" in why) is (change == "edited")
