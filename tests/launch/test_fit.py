"""`memprof fit` from end to end on small scripts, and how it chooses the next plan."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memprof.launch.fit.request import claim_outputs
from memprof.launch.parent.target import CannotStartError
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.plan_queue import PlanQueue
from memprof.planners.search.request import SearchRequest, SearchResult
from memprof.policies.accumulate.policy import Accumulate
from memprof.policies.base import Policy
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.optimizer.policy import OptimizerPolicy
from memprof.policies.plan.plan_file import read_plan
from memprof.policies.swap.policy import Swap
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace
from tests.scripts import net_of_blocks

#: Six blocks that keep about 1 MiB each for backward; what stands for {more} runs in every step.
TRAINING = (
    net_of_blocks(6)
    + """\
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    planned = any("forward" in module.__dict__ for module in model.modules())
    early = any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    optimizer.zero_grad()
    loss = model(torch.randn(512, 64)).square().mean()
    {more}
    loss.backward()
    optimizer.step()
    print("step", step, flush=True)
"""
)

#: As much as nobody could have known from the recording: another MiB once any module is checkpointed.
HEAVIER = "extra = torch.ones(2**18) if planned else None"
FAILS_UNDER_PLAN = "assert not planned, 'not with me'"
FAILS = "sys.exit(7)"
SLEEPS = "import time; time.sleep(2)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def write(more: str = "pass") -> None:
    Path("train.py").write_text(TRAINING.replace("{more}", more))


def command(*words: str) -> list[str]:
    # Dry runs are held in test_fit_dry.py.
    options = ["--skip", "1", "--steps", "1", "-o", "out", "--no-dry-run"]
    return [sys.executable, "-m", "memprof", "fit", *options, *words, "train.py"]


def fit(*words: str, status: int = 0) -> tuple[dict[str, Any], str]:
    done = subprocess.run(command("--json", *words), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == status, done.stderr
    told = json.loads(done.stdout)
    assert isinstance(told, dict)
    return told, done.stderr


def left() -> list[str]:
    return sorted(path.name for path in Path("out").iterdir())


def peak_of(path: str) -> int:
    trace = Trace.open(path)
    return max(int(live_bytes(trace.step(number)).during.max()) for number in trace.recorded_steps)


def test_plan_is_written_once_it_was_measured_to_fit() -> None:
    """The plan, its recording and the job's own are left; the peak measured under the plan is within the budget."""
    write()
    told, errors = fit("--budget", "70%", "--allow", "checkpoint")
    assert told["fits"]
    assert not told["fits_as_it_is"]
    assert told["plan"]["outcome"] == "fits"
    assert peak_of("out/head.memprof") == told["plan"]["measured"]["peak_allocated_bytes"] <= told["budget_bytes"]
    assert peak_of("out/run.memprof") == told["recorded"]["peak_allocated_bytes"] > told["budget_bytes"]
    plan = read_plan("out/plan.toml")
    assert plan.prediction is not None
    assert plan.prediction.peak_allocated_bytes == told["plan"]["predicted"]["peak_allocated_bytes"]
    assert plan.prediction.trace == "out/run.memprof"
    assert left() == ["head.memprof", "plan.toml", "run.memprof"]
    assert told["next"] == ["memprof record --plan out/plan.toml train.py"]
    assert told["code"] == "import memprof\nmemprof.apply('out/plan.toml', model, optimizer)"
    # Both runs end after the window, and what they print goes to stderr.
    assert errors.count("step 2\n") == 2
    assert "step 7" not in errors


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler")
@pytest.mark.slow
def test_compiled_runs_are_measured_and_the_fastest_is_kept() -> None:
    """With --compile the job runs compiled too, after the plan that was searched; what is kept is the fastest."""
    write()
    told, errors = fit("--budget", "70%", "--allow", "checkpoint", "--compile")
    searched, *compiled = told["attempts"]
    assert searched["outcome"] == "fits"
    assert searched["predicted"] is not None
    assert compiled
    assert all(one["describe"].startswith("compile the whole model") for one in compiled)
    assert all(one["predicted"] is None and one["measured"] is not None for one in compiled)
    # Smaller budgets for the compiler follow only where a run did not fit.
    assert [one["outcome"] for one in compiled[:-1]] == ["above"] * (len(compiled) - 1)
    assert "its effect can only be measured" in errors
    fits = [one for one in told["attempts"] if one["outcome"] == "fits"]
    assert told["plan"] == min(fits, key=lambda one: one["measured"]["step_time_us"] or float("inf"))
    assert peak_of("out/head.memprof") == told["plan"]["measured"]["peak_allocated_bytes"] <= told["budget_bytes"]
    kept = read_plan("out/plan.toml")
    assert kept.describe() == told["plan"]["describe"]
    # It can be predicted from the recording that was kept with it.
    assert kept.transform(Trace.open("out/run.memprof").steady_step()).duration_us > 0


def test_job_that_fits_is_left_as_it_is() -> None:
    """If the budget is met without a plan, none is written, and the exit code is 0."""
    write()
    told, _ = fit("--budget", "1GiB")
    assert told["fits"]
    assert told["fits_as_it_is"]
    assert told["plan"] is None
    assert told["attempts"] == []
    assert left() == ["run.memprof"]


def test_run_above_the_budget_tightens_the_search() -> None:
    """A plan that needs more than predicted is followed by one that leaves as much room, until one fits."""
    write(HEAVIER)
    told, _ = fit("--budget", "80%", "--allow", "checkpoint")
    first, *_, last = told["attempts"]
    assert first["outcome"] == "above"
    error = first["measured"]["peak_allocated_bytes"] - first["predicted"]["peak_allocated_bytes"]
    assert error > 0
    assert last["outcome"] == "fits"
    assert last["predicted"]["peak_allocated_bytes"] <= told["budget_bytes"] - error
    assert last["measured"]["peak_allocated_bytes"] <= told["budget_bytes"]
    assert read_plan("out/plan.toml").describe() == last["describe"]
    assert peak_of("out/head.memprof") == last["measured"]["peak_allocated_bytes"]


@pytest.mark.slow
def test_plan_the_job_fails_under_is_not_kept() -> None:
    """A job that fails under every plan ends with 4, the least peak reached, and no plan."""
    write(FAILS_UNDER_PLAN)
    told, errors = fit("--budget", "70%", "--allow", "checkpoint", "--attempts", "1", status=4)
    (attempt,) = told["attempts"]
    assert attempt["outcome"] == "failed"
    assert "AssertionError: not with me" in errors
    assert told["plan"] is None
    assert "unchanged job" in told["reason"]
    assert told["least_measured_bytes"] == told["recorded"]["peak_allocated_bytes"]
    assert left() == ["run.memprof"]


def test_refused_policy_is_left_out_of_the_search() -> None:
    """What the job does not take (updates in backward, where it clips) is followed by plans without it."""
    write()
    text = Path("train.py").read_text()
    # A recording of the job as it is cannot know that it would clip.
    clips = "    early and nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()"
    text = text.replace("    optimizer.step()", clips)
    # Gradients weigh here, activations do not.
    Path("train.py").write_text(text.replace("torch.randn(512, 64)", "torch.randn(4, 64)"))
    told, _ = fit("--budget", "95%", "--allow", "optimizer", status=4)
    attempts = told["attempts"]
    assert {one["describe"] for one in attempts} == {"optimizer in-backward", "optimizer in-backward, fused"}
    for attempt in attempts:
        assert attempt["outcome"] == "refused"
        assert "clip" in attempt["reason"]
        assert attempt["reason"] in told["reason"]


def test_budget_below_everything_names_the_least() -> None:
    """Nothing is tried where nothing is predicted to fit: 4, and the least peak with its plan."""
    write()
    told, _ = fit("--budget", "1KiB", "--allow", "checkpoint", status=4)
    assert told["attempts"] == []
    assert "the lowest peak is" in told["reason"]
    assert "checkpoint" in told["reason"]
    assert left() == ["run.memprof"]


def test_job_that_fails_by_itself_ends_as_it_did() -> None:
    """The job's exit status passes through, and a message says that it failed without a plan."""
    write(FAILS)
    told, _ = fit("--budget", "70%", status=7)
    assert "failed by itself" in told["reason"]
    assert "status 7" in told["reason"]
    assert told["plan"] is None


def test_interruption_leaves_nothing_half_written() -> None:
    """Ctrl-C while the job runs ends all of it with 130; no plan, no recording cut short."""
    write(SLEEPS)
    job = subprocess.Popen(
        command("--budget", "70%"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert job.stderr is not None
    for line in job.stderr:
        if line == "step 0\n":
            break
    os.killpg(job.pid, signal.SIGINT)
    out, errors = job.communicate(timeout=120)
    assert job.returncode == 130, errors
    assert "interrupted before any plan was verified" in out
    assert "internal error" not in errors
    assert not Path("out").exists()


def test_files_of_an_earlier_fit_are_not_touched(folder: Path) -> None:
    """Without force they are refused, with it they go before the job runs: none passes for this run's."""
    outputs = claim_outputs(Path("out"), "train", force=False)
    outputs.plan.write_text("")
    with pytest.raises(CannotStartError, match="exists already"):
        claim_outputs(Path("out"), "train", force=False)
    claim_outputs(Path("out"), "train", force=True)
    assert left() == []
    beside = claim_outputs(Path("fits.toml"), "train", force=False)
    assert (beside.plan.name, beside.run.name, beside.head.name) == (
        "fits.toml",
        "fits.run.memprof",
        "fits.head.memprof",
    )
    assert beside.folder is None
    default = claim_outputs(None, "train", force=False)
    assert default.folder is not None
    assert default.folder.name.startswith("train.")
    assert default.folder.suffix == ".fit"
    (folder / "file").write_text("")
    with pytest.raises(CannotStartError):
        claim_outputs(Path("file"), "train", force=True)


# -- which plan is next -------------------------------------------------------------------------------------------


def tried(peak: int, time_us: float, *policies: Policy) -> Candidate:
    return Candidate(
        policies=policies, peak_bytes=peak, step_time_us=time_us, peak_phase="forward", peak_module="", peak_op=""
    )


def answer(search_request: SearchRequest, *fitting: Candidate) -> SearchResult:
    recorded = tried(200, 10.0)
    return SearchResult(
        search_request, recorded, fitting, (), (), recorded, was_stopped=False, tried=len(fitting), took_s=0.0
    )


def queue_of(search_request: SearchRequest, *fitting: Candidate) -> tuple[PlanQueue, list[SearchRequest]]:
    """Returns a queue whose further searches find nothing, and the requests of these searches."""
    requests: list[SearchRequest] = []

    def search(request: SearchRequest) -> SearchResult:
        requests.append(request)
        return answer(request)

    return PlanQueue(answer(search_request, *fitting), search), requests


def test_fastest_plan_comes_first_and_errors_count_for_their_kind() -> None:
    """A run 15 bytes above its prediction rules out plans of its kind with less room than that, and no other."""
    search_request = SearchRequest(budget_bytes=100, is_checked=True)
    fast, tight, roomy = (
        tried(95, 11, Checkpoint(("a",))),
        tried(90, 12, Checkpoint(("b",))),
        tried(85, 14, Checkpoint(("c",))),
    )
    other = tried(99, 13, Swap(("a",), to="disk"))
    queue, requests = queue_of(search_request, fast, tight, other, roomy)
    assert queue.next() is fast
    queue.note_above(fast, 110)
    assert queue.next() is other  # tight would need 105
    queue.note_above(other, 101)
    assert queue.next() is roomy
    # What follows is a search for plans of these kinds with as much more room, and of others as they are predicted.
    again = requests[-1]
    assert [again.needed(one) for one in (fast, other, tried(95, 11, OptimizerPolicy(in_backward=True)))] == [
        110,
        101,
        95,
    ]
    queue.note_refused(roomy)
    assert queue.next() is None
    assert len(requests) == 2  # no search is repeated


def test_refused_plan_rules_out_those_that_hold_it() -> None:
    """Of a plan that was refused, every plan that holds all its policies goes, with other numbers too."""
    search_request = SearchRequest(budget_bytes=100, is_checked=True)
    refused = tried(90, 11, Accumulate(2))
    same = tried(80, 12, Accumulate(4))
    more = tried(70, 13, Accumulate(4), Checkpoint(("a",)))
    other = tried(60, 14, Checkpoint(("a",)))
    queue, requests = queue_of(search_request, refused, same, more, other)
    queue.note_refused(refused)
    assert queue.next() is other
    # Other modules may do where some did not.
    queue.note_refused(other)
    assert queue.next() is None
    (tighter,) = requests
    assert tighter.forbid == ("accumulate",)
    assert tighter.budget_bytes == search_request.budget_bytes


def test_verified_plan_rules_out_those_that_do_more() -> None:
    """A second plan to verify is of another kind, and does not do all that the first did."""
    search_request = SearchRequest(budget_bytes=100, is_checked=True)
    first = tried(90, 11, Checkpoint(("a",)))
    like = tried(80, 12, Checkpoint(("b",)))
    more = tried(70, 13, Checkpoint(("b",)), OptimizerPolicy(in_backward=True))
    other = tried(60, 14, OptimizerPolicy(in_backward=True))
    queue, _ = queue_of(search_request, first, like, more, other)
    queue.note_verified(first)
    assert queue.next() is other
