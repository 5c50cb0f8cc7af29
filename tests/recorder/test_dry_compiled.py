"""A dry run of a compiled job allocates what the compiler's own code allocates, to the byte, and runs no kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memprof.recorder.dry.compiling.generated_code import _written
from tests.recorder.recorded import Ended, record, record_script

_MODELS = Path(__file__).parents[1] / "benchmarks" / "jobs" / "compiled.py"
_HAS_COMPILER = bool(shutil.which("g++") or shutil.which("clang++"))
_JOB = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
{setup}
compiled = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    compiled(torch.randn(64, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _dry_run(folder: Path, setup: str = "", *options: str) -> Ended:
    return record_script(folder, _JOB.format(setup=setup), "--dry-run", *options)


def _compiled_notes(ended: Ended) -> list[str]:
    return [note for note in ended.trace.manifest.notes if note.startswith("torch.compile")]


def test_buffers_are_those_of_the_generated_code(tmp_path: Path) -> None:
    """ReLU is computed in the memory of the product, where eager operators make two; the verdict says what ran."""
    ended = _dry_run(tmp_path)
    step = ended.step
    hidden = step.storages.allocated_bytes == 64 * 32 * 4
    forward = step.ops.phase[np.maximum(step.storages.created_op_id, 0)] == "forward"
    assert int((hidden & forward).sum()) == 1
    (relu,) = np.flatnonzero([name.startswith("inductor.cpp_fused") and "relu" in name for name in step.ops.name])[:1]
    assert step.ops.mutates[relu]
    assert step.ops.written_bytes[relu] == 64 * 32 * 4
    assert _compiled_notes(ended) == ["torch.compile: 2 graphs compiled as in a real run, up to the kernels"]
    assert _compiled_notes(ended)[0] in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        ("import torch._dynamo.convert_frame as frames\ndel frames.CatchErrorsWrapper", "parts that memprof does not"),
        (
            (
                "import torch._inductor.config as config\n"
                "def fail(graph): raise ValueError('no pass')\n"
                "config.post_grad_custom_pre_pass = fail"
            ),
            "no pass",
        ),
    ],
    ids=["other torch", "compiler fails"],
)
def test_regions_that_cannot_be_compiled_here_run_eagerly_and_are_named(
    tmp_path: Path, setup: str, reason: str
) -> None:
    """The peak is that of the eager job, and the verdict says that a real run differs."""
    eager = record_script(tmp_path, _JOB.replace("torch.compile(model)", "model").format(setup=""), "--dry-run")
    peak = eager.peak
    ended = _dry_run(tmp_path, setup)
    (note,) = _compiled_notes(ended)
    assert "ran eagerly, and a real run differs" in note
    assert reason in note
    assert note in ended.stderr
    assert ended.peak == peak


@pytest.mark.slow
def test_nothing_is_compiled_for_a_virtual_gpu(tmp_path: Path) -> None:
    """The job runs eagerly there, which the verdict says; a plan that compiles is refused."""
    setup = "model.cuda(); torch.set_default_device('cuda')"
    ended = _dry_run(tmp_path, setup, "--device", "h100-80g")
    assert "ran eagerly, and a real run differs: nothing is compiled for a virtual GPU" in ended.stderr
    refused = _dry_run(tmp_path, setup, "--device", "h100-80g", "--compile", ".")
    assert refused.returncode == 125
    assert "a dry run compiles for the CPU only" in refused.stderr


@pytest.mark.slow
@pytest.mark.skipif(not _HAS_COMPILER, reason="there is no C++ compiler")
@pytest.mark.parametrize("model", ["unet", "dynamic", "breaks", "checkpointed", "bert"])
def test_peak_is_that_of_the_compiled_run_to_the_byte(tmp_path: Path, model: str) -> None:
    """Convolutions, other sizes in each step, broken graphs, recomputation and dropout inside."""
    window = ("--skip", "2", "--steps", "2")
    real = record(tmp_path, "--stop", *window, str(_MODELS), model, name="real.memprof")
    dry = record(tmp_path, "--dry-run", *window, str(_MODELS), model, name="dry.memprof")
    assert dry.trace.step_peaks() == real.trace.step_peaks()


@pytest.mark.slow
@pytest.mark.skipif(not _HAS_COMPILER, reason="there is no C++ compiler")
@pytest.mark.parametrize("own", [True, False], ids=["job compiles", "plan compiles"])
def test_a_budget_of_the_compiler_is_kept_in_a_dry_run(tmp_path: Path, *, own: bool) -> None:
    """The plan's budget also holds in what the job compiles itself, where a region of the plan is only inlined."""
    words = ("--compile", ".@0.3", str(_MODELS), "gpt", *(() if own else ("--eager",)))
    real = record(tmp_path, "--stop", *words, name="real.memprof")
    dry = record(tmp_path, "--dry-run", *words, name="dry.memprof")
    whole = record(tmp_path, "--dry-run", str(_MODELS), "gpt", name="whole.memprof")
    assert dry.peak == real.peak < whole.peak


@pytest.mark.slow
def test_a_dry_run_leaves_no_files_of_the_compiler(tmp_path: Path) -> None:
    """Generated code is written to a folder that is removed when the job ends."""
    (tmp_path / "train.py").write_text(_JOB.format(setup=""))
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-m", "memprof.cli.main", "record", "--dry-run", "-q", "-o", "run.memprof", "train.py"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    assert not list(folder.rglob("*.py"))


@pytest.mark.parametrize(
    ("sources", "written"),
    [
        ((["const float*", "float*", "const int64_t", "float*"], "..."), {1, 3}),
        (("triton_poi_0", "@triton.jit\ndef triton_poi_0(in_ptr0, in_out_ptr0, out_ptr1, xnumel):\n  pass"), {1, 2}),
        ((), set()),
    ],
    ids=["C++", "Triton", "unknown"],
)
def test_what_a_kernel_writes_is_read_from_its_source(sources: tuple[object, ...], written: set[int]) -> None:
    """The types of its arguments in C++, the names of its parameters in Triton."""
    assert _written(sources) == written
