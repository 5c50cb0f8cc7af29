"""A dry run of a whole loop has the peak of the whole real run, and names its moment."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from memprof.analysis.diff.budget import judge_budget
from memprof.analysis.report.report import build_report
from memprof.analysis.report.report_json import report_to_json
from memprof.analysis.report.sources import SourceLine, Sources
from memprof.analysis.report.whole_loop import _first_highest, _named_by_function, find_loop_moments, moments_of
from memprof.trace.files.spool import WHOLE
from memprof.trace.store import Trace
from tests.json_outputs import read_schema, strict
from tests.recorder.recorded import record_script

#: A list grows in every second call, an update renews a basis every tenth time, an evaluation keeps its results.
_JOB = """
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
class Renewed(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("step", 0)
            if p.ndim == 2 and state["step"] % 10 == 0:
                state["basis"] = torch.cat((p.grad @ p.grad.T,) * 12)[: p.shape[0]].clone()
            state["step"] += 1
            p.sub_(p.grad, alpha=1e-3)
kept = []
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    def forward(self, x):
        if GROWS:
            kept.append(x if len(kept) % 2 else None)
        return self.layers(x)
model = Net()
optimizer = Renewed(model.parameters(), {})
for step in range(25):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 17:
        with torch.no_grad():
            torch.cat([model(torch.randn(256, 64)) for _ in range(8)])
"""


def test_the_peak_of_each_moment_is_that_of_a_real_run(tmp_path: Path) -> None:
    """Updates and evaluations that come once are run, and what grows is run in full; other calls are skipped."""
    for grows, skips in ((False, True), (True, False)):
        script = _JOB.replace("GROWS", str(grows))
        real = record_script(tmp_path, script, "--skip", "0", "--steps", "25", name="real.memprof")
        dry = record_script(tmp_path, script, "--dry-run", "--whole", "--budget", "64MiB", name="dry.memprof")
        both = [moments_of(real.trace), find_loop_moments(dry.trace)]
        measured, predicted = (
            [(each.name, each.moment.step, each.moment.allocated_bytes) for each in moments if skips]
            for moments in both
        )
        assert predicted == measured
        if skips:
            _check_verdict(dry.trace, predicted)
        note = next(each for each in dry.trace.manifest.notes if each.startswith(WHOLE))
        assert ("; 0 calls" in note) is not skips


def _check_verdict(trace: Trace, moments: list[tuple[str, int, int]]) -> None:
    """The verdict by the budget lists every moment, in words and in JSON."""
    report = build_report(trace)
    assert report.budget is not None
    said = report.budget.describe()
    assert said.startswith(f"Fits: steady {moments[0][2] / 2**20:.2f}, ")
    assert " of 64.00 MiB; " in said
    for name, step, size in moments[1:]:
        assert f"{name} {size / 2**20:.2f} (step {step}, job.py:" in said
    over = judge_budget(trace, max(size for _, _, size in moments) - 1024).describe()
    assert over.startswith("OVER the budget by 1.00 KiB, in a dry run: steady ")
    value = report_to_json(report, 5)
    jsonschema.Draft202012Validator(strict(read_schema("report"))).validate(value)
    assert value["budget"] == {"budget_bytes": 2**26, "measured_bytes": max(size for *_, size in moments), "fits": True}
    assert [(one["moment"], one["step"], one["allocated_bytes"]) for one in value["moments"]] == moments


@pytest.mark.parametrize(
    ("functions", "name"),
    [
        (("<module>",), "between steps"),
        (("mix", "<module>"), "mix()"),
        (("_sample", "generate", "step"), "generation"),
        (("mul_", "swap_ema", "<module>"), "weight swap"),
        (("save_pretrained", "train"), "saving"),
        (("log_histograms", "train"), "logging"),
        (("log_softmax_loss", "<module>"), "log_softmax_loss()"),
        (("downsample", "decode", "evaluate", "train", "<module>"), "evaluation"),
        (("update_cache", "generate", "<module>"), "generation"),
        (("_save_checkpoint", "_maybe_log_save_evaluate", "train", "<module>"), "saving"),
        (("save", "train_and_evaluate", "<module>"), "saving"),
        (("log_metrics", "main", "<module>"), "logging"),
        (("loadModel", "<module>"), "loading"),
        (("log_metrics", "eval_model", "main"), "evaluation"),
        (("update_projector", "<module>"), "update"),
    ],
)
def test_a_moment_between_steps_has_the_name_of_its_function(functions: tuple[str, ...], name: str) -> None:
    """The outermost function that says one thing decides; without one, the innermost is named."""
    sources = Sources((tuple(SourceLine("a.py", 1, each, "a.py:1") for each in functions),))
    assert _named_by_function(sources, 0, "other") == name


def test_a_moment_has_the_first_step_that_reaches_it() -> None:
    """A scalar more in a later step does not move it there; three steps reach it."""
    assert _first_highest({39: 900_000, 40: 999_996, 41: 1_000_000, 42: 999_000}) == (40, 3)


@pytest.mark.parametrize(
    "function",
    [
        "downsample",
        "decode",
        "project_out",
        "update_cache",
        "checkpoint_block",
        "symmetric_kl",
        "logistic_loss",
        "latest_batch",
    ],
)
def test_a_model_s_helper_does_not_name_a_moment(function: str) -> None:
    """Words within its words say nothing of what the loop does."""
    sources = Sources((tuple(SourceLine("a.py", 1, each, "a.py:1") for each in (function, "forward", "main")),))
    assert _named_by_function(sources, 0, "evaluation") == "evaluation"
    assert _named_by_function(sources, 0, "other") == f"{function}()"


def test_a_worst_batch_is_as_rare_as_steps_that_are_as_high(tmp_path: Path) -> None:
    """Where all lengths differ, a single step is: its own bytes are named, and the share of steps, not of batches."""
    job = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    model(torch.ones(256 + 256 * step, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    trace = record_script(tmp_path, job, "--skip", "0", "--steps", "8").trace
    worst = moments_of(trace)[1]
    assert (worst.name, worst.moment.step, worst.steps) == ("worst batch", 7, 1)
    assert worst.moment.allocated_bytes == trace.step_peaks()[7]
    assert worst.place.startswith(" (step 7, 1 in 8 steps, ")
