"""What precision predicts for processors on which oneDNN has other kernels than on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from memprof.policies.precision.policy import Precision
from memprof.policies.precision.workspaces import packed_bytes, tiled_bytes
from memprof.policies.rewrite.depthwise import has_copies, short_copies_bytes
from memprof.recorder.machine import has_amx
from memprof.replay.live import live_bytes
from tests.recorder.recorded import record_script

#: Records a job as it is and under a policy where oneDNN is held to some instructions, and predicts one from the other.
_COMPARE = """
import json, sys
import torch
from memprof.errors import PolicyError
from memprof.policies.plan.plan import Plan
from memprof.policies.precision.policy import Precision
from memprof.replay.live import live_bytes
from tests.policies.faces import record_step

policy, job = Precision.from_flag(sys.argv[2]), sys.argv[1]
step = record_step(job)
told = {"short_types": step.short_types}
faces = {"predicted": lambda: policy.transform(step), "measured": lambda: record_step(job, Plan((policy,)))}
for name, face in faces.items():
    try:
        told[name] = int(live_bytes(face()).during.max())
    except PolicyError as error:
        told[name] = str(error)
print(json.dumps(told))
"""


def _compare(job: str, flag: str, level: str) -> dict[str, object]:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": level}
    command = [sys.executable, "-c", _COMPARE, job, flag]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.parametrize(
    ("job", "flag"), [("unet", "bf16"), ("resnet", "bf16"), pytest.param("vit", "pure-bf16", marks=pytest.mark.slow)]
)
def test_without_short_kernels_torchs_own_are_predicted(job: str, flag: str) -> None:
    """If oneDNN only computes in float32, the peak is known to the byte except for leftovers of other tests."""
    told = _compare(job, flag, "AVX2")
    assert told["short_types"] == []
    predicted, measured = told["predicted"], told["measured"]
    assert isinstance(predicted, int)
    assert isinstance(measured, int)
    assert abs(predicted - measured) <= 1e-4 * measured, f"{predicted:,} predicted, {measured:,} measured"


def test_recurrent_layers_are_refused_by_both_faces_where_onednn_has_none() -> None:
    """Torch would end the job in its first step: it could not create a primitive."""
    told = _compare("lstm", "bf16", "AVX2")
    assert told["predicted"] == told["measured"]
    assert "cannot train recurrent layers in bf16 on this processor" in str(told["predicted"])


@pytest.mark.slow
@pytest.mark.parametrize("level", ["AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX"])
@pytest.mark.parametrize(("job", "flag"), [("gpt", "bf16"), ("vit", "bf16"), ("unet", "fp16"), ("resnet", "pure-bf16")])
def test_predictions_hold_at_every_level(job: str, flag: str, level: str) -> None:
    """At each level that the processor has (others are as the highest): within 3 per cent."""
    told = _compare(job, flag, level)
    predicted, measured = told["predicted"], told["measured"]
    assert isinstance(predicted, int)
    assert isinstance(measured, int)
    assert abs(predicted - measured) <= 0.03 * measured, f"{predicted:,} predicted, {measured:,} measured"


@pytest.mark.parametrize("level", ["", "AVX", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_AMX", "ALL"])
def test_types_are_those_that_torch_asks_onednn_for(level: str) -> None:
    """The recorder reads them off the processor's instructions, since the job would see torch's own question."""
    ask = (
        "import torch; from memprof.recorder.machine import short_types; "
        "ops = torch.ops.mkldnn; names = {'bfloat16': 'bf16', 'float16': 'fp16'}; "
        "assert short_types() == [n for n, s in names.items() if getattr(ops, f'_is_mkldnn_{s}_supported')()]"
    )
    done = subprocess.run([sys.executable, "-c", ask], env={**os.environ, "ONEDNN_MAX_CPU_ISA": level}, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("level", ["", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX2"])
def test_tiles_are_used_where_the_processor_has_them(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """Only without a limit on oneDNN's instructions, or with one that includes AMX."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", level)
    assert has_amx() == (level == "" and torch.cpu._is_amx_tile_supported())


_EVALUATES = """
import torch
layers = [torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU()]
model = torch.nn.Sequential(*layers, torch.nn.AdaptiveMaxPool2d(1), torch.nn.Flatten())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(2, 3, 24, 24)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(torch.randn(32, 3, 24, 24))
"""


@pytest.mark.parametrize("level", ["ALL", "AVX512_CORE_BF16"])
def test_convolutions_are_predicted_with_tiles_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """Forward copies its output once more in tiles: the peak of an evaluation is as measured, within a hundredth."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", level)
    window = ("--skip", "1", "--steps", "2")
    plain = record_script(tmp_path, _EVALUATES, *window, name="plain.memprof")
    planned = record_script(tmp_path, _EVALUATES, *window, "--precision", "bf16", name="planned.memprof")
    predicted = int(live_bytes(Precision().transform(plain.trace.step(2))).during.max())
    measured = planned.trace.step_peaks()[2]
    assert abs(predicted - measured) <= 0.01 * measured


_DEPTHWISE = """
import torch
class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise = torch.nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.mix = torch.nn.LayerNorm(width), torch.nn.Linear(width, width)
    def forward(self, x):
        return x + self.mix(self.norm(self.depthwise(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)))
model = torch.nn.Sequential(*(Block(48) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(4, 16, 16, 48)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("level", ["ALL", "AVX512_CORE_BF16", "AVX2"])
def test_depthwise_convolutions_are_predicted_at_every_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """With AVX-512 and channels last, backward takes more than in float32: as measured, within a hundredth."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", level)
    window = ("--skip", "1", "--steps", "2")
    plain = record_script(tmp_path, _DEPTHWISE, *window, name="plain.memprof")
    planned = record_script(tmp_path, _DEPTHWISE, *window, "--precision", "bf16", name="planned.memprof")
    predicted = int(live_bytes(Precision().transform(plain.trace.step(2))).during.max())
    measured = planned.trace.step_peaks()[2]
    assert abs(predicted - measured) <= 0.01 * measured


@pytest.mark.parametrize(
    ("weight", "given", "made", "recorded", "measured"),
    [
        ((48, 1, 7, 7), (4, 48, 8, 8), (4, 48, 8, 8), 2_418_048, 3_865_384),
        ((48, 1, 7, 7), (4, 48, 20, 9), (4, 48, 20, 9), 2_417_856, 4_353_832),
        ((96, 1, 7, 7), (2, 96, 56, 56), (2, 96, 56, 56), 4_836_096, 27_186_376),
        ((40, 1, 5, 5), (4, 40, 16, 16), (4, 40, 8, 8), 1_028_160, 2_036_660),
        ((40, 1, 9, 9), (4, 40, 15, 15), (4, 40, 15, 15), 3_330_880, 5_710_908),
    ],
)
def test_copies_of_depthwise_kernels_are_those_measured(
    weight: tuple[int, ...], given: tuple[int, ...], made: tuple[int, ...], recorded: int, measured: int
) -> None:
    """Temporary memory of their backward on an Intel Xeon with AMX, torch 2.13: in float32, and in bf16."""
    assert has_copies(weight, recorded)
    assert not has_copies(weight, recorded // 2)
    assert abs(short_copies_bytes(weight, given, made, recorded) - measured) <= 40


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "threads", "measured"),
    [
        (4096, 1024, 1024, 1, 1_053_696),
        (4096, 1024, 1024, 2, 2_107_008),
        (1024, 256, 256, 1, 136_192),
        (256, 256, 1024, 1, 21_504),
        (64, 32, 64, 1, 9_216),
    ],
)
def test_buffers_of_layers_in_tiles_are_those_measured(
    rows: int, depth: int, columns: int, threads: int, measured: int
) -> None:
    """Temporary memory of linear layers' bf16 products on an Intel Xeon with AMX, torch 2.13."""
    sizes = [np.array([float(size)]) for size in (rows, depth, columns)]
    buffers = tiled_bytes(*sizes, np.array([False]), np.array([columns > threads * rows]))
    assert abs(1024 + threads * buffers.item() - measured) <= 1024


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "is_transposed", "measured"),
    [
        (64, 1024, 10, False, 69_120),
        (4096, 1024, 256, False, 132_096),
        (64, 1024, 256, True, 201_856),
        (128, 1024, 64, True, 238_720),
    ],
)
def test_deep_products_without_tiles_are_summed_in_parts(
    rows: int, depth: int, columns: int, is_transposed: bool, measured: int
) -> None:
    """The same processor held to AVX-512, where 512 of the depth are summed at a time."""
    sizes = [np.array([float(size)]) for size in (rows, depth, columns)]
    assert 1024 + packed_bytes(*sizes, np.array([is_transposed])).item() == measured
