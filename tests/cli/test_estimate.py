"""`memprof estimate` as it is typed and read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memprof.cli.main import main
from memprof.cli.verbs import estimate as verb

SAMPLE = Path(__file__).parents[2] / "sample_traces" / "gpt" / "run.memprof"
SHAPE = "layers=4,width=128,heads=4,vocab=25,positions=128,tied=no"


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert main(["estimate", *map(str, words)]) == status
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.out if status == 0 else captured.err


def test_page_says_what_it_comes_to_and_by_which_formula(capsys: pytest.CaptureFixture[str]) -> None:
    """Verdict, setting, machine, a line a term with its formula, what the letters are, what to type next."""
    page = run(
        capsys,
        "gpt3-175b",
        "--precision=bf16-mixed",
        "--checkpoint=layers",
        "--zero=3",
        "--ranks=64",
        "--machine=h100-80g",
    )
    lines = page.splitlines()
    # Two bytes of 174,604,259,328 weights over 64 ranks: 5.08 GiB.
    assert lines[0].startswith("gpt3-175b: ")
    assert "174,604,259,328 parameters: weights 5.08 GiB, gradients 5.08 GiB" in lines[0]
    assert lines[1] == (
        "batch 1 of 2,048 tokens, bf16-mixed, adamw, flash attention, dropout, layers recomputed, ZeRO 3 over 64 ranks"
    )
    assert lines[2].startswith("H100 SXM: ")
    assert "With ZeRO 3, " in lines[2]
    rows = {line.split("  ")[0]: line for line in lines if line}
    assert rows["weights"].endswith("2 P/N")
    assert rows["activations: inputs of the layers"].endswith("2 L sbh")
    assert rows["total"].split()[-2:] == ["100.0", "%"]
    assert "P = 174,604,259,328 (parameters), N = 64 (ranks), L = 96 (layers)" in page
    assert "note: the paper rounds to 175B parameters" in page
    assert lines[-1].startswith("next: memprof record --dry-run --device ")


def test_explain_names_sources_and_limits(capsys: pytest.CaptureFixture[str]) -> None:
    """Each formula with its source and where it does not hold."""
    page = run(capsys, "gpt3-2.7b", "--tokens=1M", "--precision=fp16", "--checkpoint=layers", "--explain")
    assert "152.59 GiB" in page
    assert "inputs of the layers: 2 L sbh" in page
    assert "  source: Chen et al. 2016" in page
    assert "  not when: " in page
    assert "shape: Brown et al. 2020" in page


def test_beside_a_recording(capsys: pytest.CaptureFixture[str]) -> None:
    """The setting is read off the recording; each part is shown with its error."""
    page = run(capsys, "--transformer", SHAPE, "--from", SAMPLE)
    assert "batch 16 of 128 tokens, fp32, adamw, flash attention, dropout, on the CPU" in page
    rows = {
        line.split("  ")[0]: line for line in page[page.index("Compared with the recording") :].splitlines() if line
    }
    for part in ("weights", "gradients", "optimizer", "activations"):
        assert "exact" in rows[part], part
    assert "-1.00 KiB" in rows["ends"]
    assert page.splitlines()[-1].startswith("next: memprof report ")


def test_what_is_asked_for_goes_before_what_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """Half the batch keeps half."""
    words = ("--transformer", SHAPE, "--from", SAMPLE, "--json")
    whole, half = json.loads(run(capsys, *words)), json.loads(run(capsys, *words, "--batch=8"))
    assert 2 * half["activations_bytes"] == whole["activations_bytes"]
    parts = {one["part"]: one for one in half["compared"]}
    assert parts["activations"]["error_ratio"] == -0.5


def test_a_config_json(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path is read as a file; a known name is that model even where a folder is called so."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
    assert json.loads(run(capsys, "gpt2", "--json"))["parameters"] == 124_439_808
    # One layer of 7,087,872 instead of twelve.
    assert json.loads(run(capsys, "config.json", "--json"))["parameters"] == 124_439_808 - 11 * 7_087_872


def test_other_models(capsys: pytest.CaptureFixture[str]) -> None:
    """Linear layers, convolutions, and a number alone."""
    assert json.loads(run(capsys, "--mlp", "784,512,10", "--json"))["parameters"] == 407_050
    assert json.loads(run(capsys, "--conv", "3x8x8,4k3,linear2", "--json"))["parameters"] == 112 + 4 * 36 * 2 + 2
    alone = run(capsys, "--parameters", "7B", "--precision", "bf16-mixed")
    assert "a parameter count alone does not determine activations" in alone
    assert "7,000,000,000 parameters" in alone


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ((), 2, "There is no model"),
        (("gpt2", "--mlp", "3,4"), 2, "more than one model"),
        (("gpt2x",), 2, "did you mean gpt2"),
        (("missing.json",), 5, "config.json"),
        (("gpt2", "--zero", "2"), 2, "--ranks"),
        (("gpt2", "--checkpoint", "some"), 2, "none, selective, layers"),
        (("gpt2", "--checkpoint", "none:3"), 2, "none, selective, layers"),
        (("gpt2", "--checkpoint", "layers:0"), 2, "none, selective, layers"),
        (("gpt2", "--tokens", "1M", "--batch", "2"), 2, "mutually exclusive"),
        (("--mlp", "3,4", "--seq", "8"), 2, "apply to transformers only"),
        (("--mlp", "3,4", "--from", __file__), 5, "not a memprof recording"),
        (("gpt2", "--machine", "abacus"), 2, "abacus"),
    ],
)
def test_mistakes_get_a_sentence(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], status: int, says: str
) -> None:
    """What is wrong and what to do, with the exit code of its kind."""
    assert says in run(capsys, *words, status=status)


def test_choices_are_those_of_the_formulas() -> None:
    """The verb lists what there is without importing it."""
    from memprof.analysis.estimate.terms import OPTIMIZERS, PRECISIONS

    assert tuple(PRECISIONS) == verb._PRECISIONS
    assert OPTIMIZERS == verb._OPTIMIZERS
