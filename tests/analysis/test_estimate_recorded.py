"""Formulas compared with recordings: of the samples, and of a transformer in Megatron's configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memprof.analysis.estimate.against import Compared, RecordedSetting, compare, read_setting
from memprof.analysis.estimate.estimate import Estimate, estimate
from memprof.analysis.estimate.model import Model, model_of_count, read_transformer
from memprof.analysis.estimate.network import Network
from memprof.analysis.estimate.terms import PRECISIONS, Setting
from memprof.trace.store import Trace

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces"
JOB = ROOT / "lab" / "benchmarks" / "jobs" / "estimated.py"

GPT = "layers=4,width=128,heads=4,vocab=25,positions=128,tied=no"
UNIT = "[{0}k3p1,bn,relu,{0}k3p1,bn],relu"
FIRST = "[{0}k3s2p1,bn,relu,{0}k3p1,bn|{0}k1s2,bn],relu"
RESNET = ",".join(
    [
        f"3x32x32,16k3p1,bn,relu,({UNIT.format(16)})x2",
        *(f"{FIRST.format(width)},{UNIT.format(width)}" for width in (32, 64)),
        "avgpool,dropout,linear10",
    ]
)

#: What nll_loss keeps beside: the sum of the weights it divided by, one number.
TOTAL_WEIGHT = 4


def beside(model: Model, trace: Trace, **more: object) -> tuple[Estimate, dict[str, Compared], RecordedSetting]:
    told = read_setting(trace, model)
    length = told.length or 1
    chosen: dict[str, object] = {
        "tokens": (told.batch or 1) * length,
        "length": length,
        "precision": PRECISIONS[told.precision or ""],
        "optimizer": told.optimizer,
        "is_on_cpu": told.is_on_cpu,
    }
    found = estimate(model, Setting(**{**chosen, **more}))  # type: ignore[arg-type]
    return found, {one.name: one for one in compare(found, trace)}, told


def record(folder: Path, *words: str) -> Trace:
    path = folder / "run.memprof"
    dry = ["--dry-run", "--device", "a100-80g"] if "bf16" in words else []
    command = [sys.executable, "-m", "memprof.cli.main", "record", "-q", *dry, "-o", str(path), str(JOB), *words]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    return Trace.open(path)


def test_the_gpt_sample() -> None:
    """Weights, gradients, state and all that the layers keep to the byte; the ends but for positions and a number."""
    _, parts, told = beside(read_transformer(GPT), Trace.open(SAMPLES / "gpt" / "run.memprof"))
    assert told == RecordedSetting(batch=16, length=128, precision="fp32", optimizer="adamw", is_on_cpu=True, ranks=1)
    for name in ("weights", "gradients", "optimizer", "activations"):
        assert parts[name].error_bytes == 0, name
    assert parts["activations"].recorded_bytes > 70 * 2**20
    # The script makes the numbers of 128 positions, 8 bytes each, in the step.
    assert parts["ends"].error_bytes == -8 * 128 - TOTAL_WEIGHT
    assert abs(parts["all terms"].error_ratio or 1) < 0.01


def test_the_resnet_sample() -> None:
    """A residual network written in a line: everything to the byte but the loss's one number."""
    _, parts, told = beside(Model("resnet", Network.read(RESNET)), Trace.open(SAMPLES / "resnet" / "run.memprof"))
    assert told == RecordedSetting(
        batch=32, length=None, precision="fp32", optimizer="momentum", is_on_cpu=True, ranks=1
    )
    for name in ("weights", "gradients", "optimizer"):
        assert parts[name].error_bytes == 0, name
    assert parts["activations and ends"].error_bytes == -TOTAL_WEIGHT
    assert parts["activations and ends"].recorded_bytes > 33 * 2**20


def test_the_lstm_sample() -> None:
    """Of a number of parameters: weights and gradients to the byte, state but for the counts of 10 more tensors."""
    model = model_of_count("289635")  # 99 x 128 + 2 x 4 x 128 x (128 + 128 + 2) + 129 x 99
    _, parts, _ = beside(model, Trace.open(SAMPLES / "lstm" / "run.memprof"))
    assert set(parts) == {"weights", "gradients", "optimizer", "fullest moment", "all terms"}
    assert parts["weights"].error_bytes == parts["gradients"].error_bytes == 0
    assert parts["optimizer"].error_bytes == -4 * 10


SHAPE = "layers=3,width=64,heads=4,vocab=512,positions=64,fused_qkv=no"


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return record(tmp_path_factory.mktemp("bf16"), "--precision", "bf16")


def test_megatrons_form_is_what_a_gpu_keeps(in_bf16: Trace) -> None:
    """sbh (34 + 5 as/h), of a transformer in 16 bits with dropout, as dispatched on a GPU: to the byte."""
    found, parts, told = beside(read_transformer(SHAPE), in_bf16, has_flash=False)
    assert (told.precision, told.is_on_cpu) == ("bf16", False)
    (layers,) = [term for term in found.terms if term.name == "saved by the layers"]
    assert layers.formula == "L sbh (34 + 5 as/h)"
    # 3 layers, 4 samples of 64 tokens, 64 wide, 4 heads: 34 + 5 x 4 x 64 / 64 = 54 bytes a value.
    assert layers.bytes == 3 * 4 * 64 * 64 * 54
    assert parts["activations"].error_bytes == 0
    # Each tensor begins a block of 512 bytes; the loss's number takes one.
    assert parts["ends"].error_bytes == -512
    for name in ("weights", "gradients", "optimizer"):
        assert -0.03 < (parts[name].error_ratio or 0) <= 0, name


@pytest.mark.parametrize(
    ("words", "shape", "more"),
    [
        ((), SHAPE, {"has_flash": False}),
        pytest.param(
            ("--checkpoint-every", "1"), SHAPE, {"has_flash": False, "checkpoint": "layers"}, marks=pytest.mark.slow
        ),
        pytest.param(
            ("--precision", "bf16-autocast"),
            SHAPE,
            {"has_flash": False, "precision": PRECISIONS["bf16-autocast"]},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--style", "llama", "--attention", "flash", "--kv-heads", "2", "--optimizer", "adafactor"),
            "layers=3,width=64,heads=4,vocab=512,style=llama,kv_heads=2,inner=256",
            {},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["plain", "checkpointed", "autocast", "llama"],
)
def test_what_a_cpu_keeps(tmp_path: Path, words: tuple[str, ...], shape: str, more: dict[str, object]) -> None:
    """Every part to the byte on the CPU, the loss's one number aside."""
    _, parts, _ = beside(read_transformer(shape), record(tmp_path, *words), **more)
    assert abs(parts["fullest moment"].error_ratio or 0) < 0.1
    errors = {name: one.error_bytes for name, one in parts.items() if name not in ("fullest moment", "all terms")}
    assert errors == {"weights": 0, "gradients": 0, "optimizer": 0, "activations": 0, "ends": -TOTAL_WEIGHT}
