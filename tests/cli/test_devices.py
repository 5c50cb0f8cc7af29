"""`memprof devices` and `memprof suggest --devices`: how many devices a job needs, and the fastest arrangement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.plans.devices import WORLD_SIZES, devices_needed
from memprof.cli.main import main
from memprof.policies.plan.plan_file import read_plan
from memprof.policies.shard.policy import Shard
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.recorder.recorded import record_script

TRACE = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"


@pytest.fixture(scope="module")
def step() -> Step:
    return Trace.open(TRACE).steady_step()


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> tuple[str, str]:
    assert main(["devices", str(TRACE), *words]) == status
    return capsys.readouterr()


def peak_of(step: Step, stage: int, ranks: int) -> int:
    return int(live_bytes(Shard(stage, ranks).transform(step)).during.max())


def test_the_fewest_devices_that_fit_are_needed(step: Step) -> None:
    """At fsdp's own peak over 4 ranks, 4 are needed: over 2 nothing is as low. Every size has four ways."""
    budget = peak_of(step, 3, 4)
    assert min(peak_of(step, stage, 2) for stage in range(4)) > budget
    found = devices_needed(step, budget)
    assert found.needed is not None
    assert found.needed.policy.world_size == 4
    assert found.needed.peak_allocated_bytes <= budget
    assert not found.fits_alone
    assert [each.policy.world_size for each in found.ranks] == [size for size in WORLD_SIZES for _ in range(4)]


def test_one_device_may_be_enough_and_no_number_either(step: Step) -> None:
    """The recorded peak fits one device; one byte fits none."""
    peak = int(live_bytes(step).during.max())
    assert devices_needed(step, peak).fits_alone
    assert devices_needed(step, 1).needed is None


def test_the_page_says_how_many_and_writes_the_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, step: Step
) -> None:
    """The verdict first; the plan has its prediction; 4 is the exit code where nothing is enough."""
    budget, plan = peak_of(step, 3, 4), tmp_path / "plan.toml"
    out, _ = run(capsys, "--budget", str(budget), "--write", str(plan))
    assert out.startswith("4 devices are needed: fsdp over 4 holds ")
    assert f"memprof record --plan {plan}" in out
    written = read_plan(plan)
    assert written.prediction is not None
    assert written.prediction.peak_allocated_bytes == budget
    out, _ = run(capsys, "--budget", "1KiB", status=4)
    assert out.startswith("No number of devices suffices: ")


def test_json_holds_every_way(capsys: pytest.CaptureFixture[str], step: Step) -> None:
    """Bytes and microseconds, by strategy and ranks."""
    found = json.loads(run(capsys, "--budget", str(peak_of(step, 3, 4)), "--json")[0])
    assert found["needed"]["world_size"] == 4
    assert {each["strategy"] for each in found["ranks"]} == {"ddp", "zero1", "zero2", "fsdp"}
    assert len(found["ranks"]) == 4 * len(WORLD_SIZES)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [((), "a budget is needed"), (("--budget", "many"), "many"), (("--machine", "rtx3o90"), "rtx3")],
)
def test_the_budget_is_checked_first(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str) -> None:
    """As for suggest: one sentence, exit code 2."""
    assert sentence in run(capsys, *words, status=2)[1]


def test_a_communicator_takes_its_part_of_a_rank_but_not_of_a_job_alone(step: Step) -> None:
    """fsdp over 4 ranks fits its peak and the communicator, and not one byte less; alone, only the job counts."""
    peak, communicator = peak_of(step, 3, 4), 1 << 20
    found = devices_needed(step, peak + communicator, communicator_bytes=communicator)
    assert found.needed is not None
    assert found.needed.policy.world_size == 4
    less = devices_needed(step, peak + communicator - 1, communicator_bytes=communicator)
    assert less.needed != found.needed
    alone = int(live_bytes(step).during.max())
    assert devices_needed(step, alone, communicator_bytes=alone).fits_alone


_TWO_MODELS = """
import torch
from torch import nn
maker, judge = nn.Linear(64, 64), nn.Linear(64, 1)
optimizers = [torch.optim.Adam(model.parameters()) for model in (maker, judge)]
for _ in range(4):
    made = maker(torch.randn(8, 64))
    judge(made).mean().backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    judge(made.detach()).mean().backward()
    optimizers[1].step()
    optimizers[0].zero_grad()
"""


def test_jobs_with_an_update_between_backward_passes_have_two_ways(tmp_path: Path) -> None:
    """Of two models that update in turn, ddp and zero1 are predicted; why the others are not is said once."""
    trace = record_script(tmp_path, _TWO_MODELS).trace
    found = devices_needed(trace.fullest_step(), 1)
    assert {each.policy.stage for each in found.ranks} == {0, 1}
    assert [sentence.partition(",")[0] for sentence in found.refused] == ["the job runs backward again after an update"]


def arrange(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["suggest", str(TRACE), *words]) == status
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(arrange(capsys, *words, "--json", status=status))
    return found


def test_the_page_names_the_fastest_and_what_carries_it_out(capsys: pytest.CaptureFixture[str]) -> None:
    page = arrange(capsys, "--devices", "4", "--budget", "30%", "--layout", "pp=4")
    assert "4 devices: pp 4 is fastest" in page
    assert "torch.distributed.pipelining.PipelineStage and Schedule" in page
    assert "Peak of each stage" in page
    assert "assumed: links carry 25 GB/s inside a node of 8 and 50 GB/s from each device to others" in page


def test_the_written_plan_is_the_fastest_that_memprof_applies(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = tmp_path / "plan.toml"
    page = arrange(capsys, "--devices", "4", "--budget", "60%", "--layout", "dp=4", "--write", str(written))
    assert f"next: memprof record --plan {written} train.py" in page
    plan = read_plan(written)
    shard = next(policy for policy in plan.policies if isinstance(policy, Shard))
    assert shard.world_size == 4
    step = Trace.open(TRACE).fullest_step(is_whole=True)
    assert plan.prediction is not None
    assert live_bytes(plan.transform(step)).during.max() == plan.prediction.peak_allocated_bytes


def test_json_has_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--devices", "4", "--budget", "40%", "--layout", "pp=2,tp=2,zero=0", "--global-batch", "32")
    (one,) = found["arrangements"]
    assert (one["data"], one["tensor"], one["pipeline"], one["context"]) == (1, 2, 2, 1)
    assert one["micro_batches"] * one["samples"] == found["global_samples"] == 32
    assert one["source"] == "modelled"
    assert max(stage["peak_bytes"] for stage in one["stages"]) == one["peak_bytes"] <= found["budget_bytes"]
    parts = one["compute_us"] + one["communication_us"] + one["bubble_us"] + one["update_us"]
    assert parts == pytest.approx(one["step_us"])
    assert [len(found["balance"][kind]["stages"]) for kind in ("chosen", "equal", "levelled")] == [2, 2, 2]


def test_faster_links_make_tensor_parallelism_faster(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--devices", "4", "--budget", "60%", "--layout", "tp=4", "--devices-per-node", "4")
    slow = as_json(capsys, *words)["arrangements"][0]["step_us"]
    fast = as_json(capsys, *words, "--machine", "h100-80g")["arrangements"][0]
    assert fast["communication_us"] < slow


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--layout", "tp=2"), "--layout describes an arrangement over several devices: add --devices N."),
        (("--devices", "4", "--layout", "xp=2"), "invalid part 'xp=2' of --layout"),
        (("--devices", "4", "--world-size", "4"), "--devices arranges the job over devices by itself"),
        (("--devices", "4", "--check"), "--devices arranges the job over devices by itself"),
    ],
)
def test_what_cannot_be_combined_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert main(["suggest", str(TRACE), "--budget", "60%", *words]) == 2
    assert says in capsys.readouterr().err
