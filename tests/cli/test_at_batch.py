"""`--at-batch N` of `memprof suggest` and `memprof predict`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memprof.cli.main import main
from memprof.policies.plan.plan_file import read_plan

GPT = str(Path(__file__).parent.parent.parent / "sample_traces" / "gpt" / "run.memprof")
#: Peaks of the sample by its `--batch-size`, as recorded with it: the sample itself has 16.
MEASURED = {16: 93_237_072, 24: 134_317_900}


def run(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(list(words)) == status
    return capsys.readouterr().out


def test_peak_at_another_batch_is_the_measured_one(capsys: pytest.CaptureFixture[str]) -> None:
    """From the sample's batch of 16, the peak at 24 is predicted to the byte; the answer says that it is scaled."""
    told = json.loads(run(capsys, "predict", GPT, "--at-batch", "24", "--json"))
    assert told["predicted"]["peak_allocated_bytes"] == MEASURED[24]
    assert (told["batch"], told["how"]) == (24, "rule")
    assert any(warning.startswith("scaled from one recording at batch 16 to 24") for warning in told["warnings"])


def test_plans_are_for_that_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The budget, the plans and what is written are for the batch that was asked for."""
    written = tmp_path / "plan.toml"
    words = ("suggest", GPT, "--at-batch", "24", "--budget", "100MiB", "--allow", "checkpoint", "--time-limit", "20")
    page = run(capsys, *words, "--write", str(written))
    assert f"at batch 24: peak {MEASURED[24] / 2**20:.2f} MiB" in page
    assert "with the job's batch set to 24" in page
    prediction = read_plan(written).prediction
    assert prediction is not None
    assert prediction.how == "rule"
    assert prediction.peak_allocated_bytes <= 100 << 20
    told = json.loads(run(capsys, *words[:4], "--budget", "1GiB", "--json"))  # without a search
    assert told["recorded"]["peak_allocated_bytes"] == MEASURED[24]
    assert told["batch"] == 24


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("suggest", GPT, "--budget", "1GiB", "--at-batch", "8", "--compiled", GPT),
            "--at-batch plans for a size at which no compiled run was recorded",
        ),
        (("suggest", GPT, "--budget", "1GiB", "--also", GPT), "--also gives recordings of other sizes"),
        (("predict", GPT, "--checkpoint", "layers.*", "--also", GPT), "--also gives recordings at other sizes"),
        (("predict", GPT), "nothing to predict"),
        (("predict", GPT, "--at-batch", "0"), "--at-batch"),
    ],
)
def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str) -> None:
    """Invalid options are refused before anything is computed."""
    assert main(list(words)) == 2
    assert sentence in capsys.readouterr().err
