"""`memprof suggest --devices`: the fastest arrangement over several devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memprof.cli.main import main
from memprof.policies.plan.plan_file import read_plan
from memprof.policies.shard.policy import Shard
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace

TRACE = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(["suggest", str(TRACE), *words]) == status
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, *words, "--json", status=status))
    return found


def test_the_page_names_the_fastest_and_what_carries_it_out(capsys: pytest.CaptureFixture[str]) -> None:
    page = run(capsys, "--devices", "4", "--budget", "30%", "--layout", "pp=4")
    assert "4 devices: pp 4 is fastest" in page
    assert "torch.distributed.pipelining.PipelineStage and Schedule" in page
    assert "Peak of each stage" in page
    assert "assumed: links carry 25 GB/s inside a node of 8 and 50 GB/s from each device to others" in page


def test_the_written_plan_is_the_fastest_that_memprof_applies(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written = tmp_path / "plan.toml"
    page = run(capsys, "--devices", "4", "--budget", "60%", "--layout", "dp=4", "--write", str(written))
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
