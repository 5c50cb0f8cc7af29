"""`--at-batch N`, `--at-length N` and `--lengths FILE` of `memprof suggest` and `memprof predict`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memprof.cli.main import main
from memprof.policies.plan.plan_file import read_plan
from memprof.trace.store import Trace
from tests.planners.lengths import record_lengths
from tests.planners.sizes import peak_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of several lengths, and one of 64 alone."""
    path = tmp_path_factory.mktemp("lengths")
    record_lengths(path / "run.memprof", (24, 40, 16, 32, 24, 40))
    record_lengths(path / "64.memprof", [64] * 4)
    return path


def run(capsys: pytest.CaptureFixture[str], *words: str | Path, status: int = 0) -> str:
    assert main([str(word) for word in words]) == status
    told = capsys.readouterr()
    return told.err if status == 2 else told.out


def test_peak_at_a_length_is_the_measured_one(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """A recording whose steps differ in length needs no other one: the peak at 64 is exact, and said with bounds."""
    words = ("predict", folder / "run.memprof", "--at-length", "64")
    told = json.loads(run(capsys, *words, "--json"))
    peak = peak_bytes(Trace.open(folder / "64.memprof").steady_step())
    assert told["predicted"]["peak_allocated_bytes"] == peak
    assert (told["length"], told["batch"], told["how"], told["lengths"]) == (64, None, "modelled", None)
    least, most = told["peak_interval_bytes"]
    assert least < peak < most
    page = run(capsys, *words)
    assert "scaled from 4 recorded steps at length 16, 24, 32 and 40 to 64" in page
    assert page.startswith("predicted peak at length 64: ")


def test_plans_say_what_they_are_for(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    """The plan file contains the length; a run of it is compared, and one of another length is not."""
    written = tmp_path / "plan.toml"
    words = ("suggest", folder / "run.memprof", "--at-length", "64", "--budget", "1300KiB", "--allow", "checkpoint")
    page = run(capsys, *words, "--write", written)
    assert "at length 64: peak" in page
    assert "train under it on sequences of 64, and compare" in page
    plan = read_plan(written)
    assert (plan.at_length, plan.at_batch) == (64, None)
    assert plan.prediction is not None
    assert plan.prediction.most_peak_bytes <= 1300 << 10

    same = record_lengths(tmp_path / "same.memprof", [64] * 4, plan)
    told = json.loads(run(capsys, "verify", written, same, "--json"))
    assert abs(told["error"]["peak_bytes"]) <= plan.prediction.most_peak_bytes - plan.prediction.peak_allocated_bytes
    # Predicted anew, it is for the same length.
    again = json.loads(run(capsys, "verify", written, folder / "run.memprof", same, "--json"))
    assert again["error"]["peak_bytes"] == told["error"]["peak_bytes"]

    other = record_lengths(tmp_path / "other.memprof", [32] * 4, plan)
    page = run(capsys, "verify", written, other, status=3)
    assert "cannot be compared: it is for a step at length 64 on 4x63, 4x64" in page


def test_lengths_of_a_data_set(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    """The longest batch counts; the page says how many are beyond what was recorded, and what a mix reserves."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("# of the training set\n20\n\n16 12, 64\n41,8\n" + "\n".join(str(30 + n % 9) for n in range(60)))
    told = json.loads(run(capsys, "predict", folder / "run.memprof", "--lengths", lengths, "--json"))
    assert told["length"] == 64
    mix = told["lengths"]
    assert (mix["batches"], mix["longest"], mix["recorded_longest"], mix["above"]) == (63, 64, 40, 2)
    assert mix["reserved_mix_bytes"] >= mix["reserved_alone_bytes"] >= told["predicted"]["peak_allocated_bytes"]
    words = ("suggest", folder / "run.memprof", "--lengths", lengths, "--budget", "1300KiB", "--allow", "checkpoint")
    page = run(capsys, *words)
    assert "2 of 63 batches are longer than recorded (40)" in page
    assert "a mix of 48 batches of" in page
    assert f"next: memprof suggest {folder / 'run.memprof'} --lengths {lengths} --budget 1300KiB " in page


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("12\nabc\n", "line 2: 'abc' is not a length"),
        ("12\n-3\n", "line 2: '-3' is not a length"),
        ("0\n", "line 1: '0' is not a length"),
        ("12\n7.5\n", "line 2: '7.5' is not a length"),
        ("9" * 50, "is not a length"),
        ("# nothing\n\n", "contains no lengths"),
    ],
)
def test_bad_lengths_are_one_sentence(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, text: str, sentence: str
) -> None:
    """Text that is not a length is named with its line."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text(text)
    assert main(["predict", str(folder / "run.memprof"), "--lengths", str(lengths)]) == 5
    err = capsys.readouterr().err
    assert sentence in err
    assert len(err.splitlines()) == 1


def test_bytes_that_are_no_text(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    """A missing file and one with other contents each produce one message."""
    lengths = tmp_path / "lengths.txt"
    words = ["predict", str(folder / "run.memprof"), "--lengths", str(lengths)]
    assert main(words) == 5
    assert "no file" in capsys.readouterr().err
    lengths.write_bytes(b"\xff\xfe\x00\x80")
    assert main(words) == 5
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--at-length", "0"), "--at-length"),
        (("--at-length", "8", "--at-batch", "8"), "--at-batch and --at-length are mutually exclusive"),
        (("--at-length", "8", "--step", "3"), "--at-length needs all steps of the recording"),
    ],
)
def test_mistakes_are_one_sentence(
    capsys: pytest.CaptureFixture[str], folder: Path, words: tuple[str, ...], sentence: str
) -> None:
    """Incompatible options are refused."""
    assert sentence in run(capsys, "predict", folder / "run.memprof", *words, status=2)


GPT = str(Path(__file__).parent.parent.parent / "sample_traces" / "gpt" / "run.memprof")


#: Peaks of the sample by its `--batch-size`, as recorded with it: the sample itself has 16.
MEASURED = {16: 93_237_072, 24: 134_317_900}


def printed(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(list(words)) == status
    return capsys.readouterr().out


def test_peak_at_another_batch_is_the_measured_one(capsys: pytest.CaptureFixture[str]) -> None:
    """From the sample's batch of 16, the peak at 24 is predicted to the byte; the answer says that it is scaled."""
    told = json.loads(printed(capsys, "predict", GPT, "--at-batch", "24", "--json"))
    assert told["predicted"]["peak_allocated_bytes"] == MEASURED[24]
    assert (told["batch"], told["how"]) == (24, "rule")
    assert any(warning.startswith("scaled from one recording at batch 16 to 24") for warning in told["warnings"])


def test_plans_are_for_that_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The budget, the plans and what is written are for the batch that was asked for."""
    written = tmp_path / "plan.toml"
    words = ("suggest", GPT, "--at-batch", "24", "--budget", "100MiB", "--allow", "checkpoint", "--time-limit", "20")
    page = printed(capsys, *words, "--write", str(written))
    assert f"at batch 24: peak {MEASURED[24] / 2**20:.2f} MiB" in page
    assert "with the job's batch set to 24" in page
    prediction = read_plan(written).prediction
    assert prediction is not None
    assert prediction.how == "rule"
    assert prediction.peak_allocated_bytes <= 100 << 20
    told = json.loads(printed(capsys, *words[:4], "--budget", "1GiB", "--json"))  # without a search
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
def test_mistakes_about_batches_are_one_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str
) -> None:
    """Invalid options are refused before anything is computed."""
    assert main(list(words)) == 2
    assert sentence in capsys.readouterr().err
