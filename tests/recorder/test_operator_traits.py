"""What is known of operators and notes about runs: zeros filled, common traits, gradients in evaluation."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from memprof.analysis.plans.predict import step_warnings
from memprof.recorder.calls.operator_traits import OperatorTraits, _span
from memprof.trace.files.spool import GRADIENTS_ENABLED
from tests.recorder.recorded import record_script


def test_attention_on_the_cpu_has_the_flops_of_attention_elsewhere() -> None:
    """Forward has 2 products of 8 x 16 by 16 x 8 for each of 4 heads, backward 5. Torch has no formula for these."""
    heads = torch.ones(1, 4, 8, 16)
    product = 2 * 4 * 8 * 16 * 8
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    out, log_sum = forward(heads, heads, heads)
    assert OperatorTraits(forward, 0).count_flops((heads,) * 3, {}, (out, log_sum)) == 2 * product
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    given = (heads, heads, heads, heads, out, log_sum, 0.0, False)
    assert OperatorTraits(backward, 0).count_flops(given, {}, backward(*given)) == 5 * product


def test_the_address_of_a_fake_tensor_is_not_read() -> None:
    """torch would warn the user of it."""
    with FakeTensorMode():
        fake = torch.ones(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _span(fake) == (0, 64)


_JOB = """
import torch
torch.manual_seed(0)
layer = torch.nn.Linear(64, 5000)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(STEPS):
    scores = layer(torch.randn(64, 64))
    places = torch.randint(64, (64,))
    loss = CHOSEN.square().sum() + scores.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "chosen", ["scores.gather(-1, places[:, None])", "scores[places[:8]]"], ids=["gather", "index"]
)
def test_peak_is_that_of_the_unrecorded_run(chosen: str, tmp_path: Path) -> None:
    """With a timed step that shows it, without one since the job ends before, and in a dry run."""
    peaks = {}
    for name, steps, flags in (("timed", 8, ()), ("short", 4, ()), ("dry", 4, ("--dry-run",))):
        folder = tmp_path / name
        folder.mkdir()
        ended = record_script(folder, _JOB.replace("CHOSEN", chosen).replace("STEPS", str(steps)), *flags)
        assert ended.returncode == 0, ended.stderr
        peaks[name] = int(ended.trace.step(2).memory.allocated_bytes.max())
    assert len(set(peaks.values())) == 1, peaks


_EVALUATING_JOB = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(batch):
    loss = model(torch.randn(batch, 128)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
def evaluate():
    model.eval()
    total = 0
    for _ in range(2):
        total += model(torch.randn(2048, 128)).square().mean()
    model.train()
    return float(total)
{loop}
"""


_EACH_EPOCH = "for epoch in range(4):\n    train(32)\n    {evaluate}"


_AT_THE_END = "for step in range(8):\n    train(32)\n{evaluate}"


_FROZEN = "model.eval()\nfor step in range(8):\n    train(32 if step < 7 else 2048)\nmodel(torch.randn(4096, 128))"


@pytest.mark.parametrize(
    ("loop", "is_told"),
    [
        (_EACH_EPOCH.format(evaluate="evaluate()"), True),
        (_EACH_EPOCH.format(evaluate="torch.no_grad()(evaluate)()"), False),
        (_AT_THE_END.format(evaluate="evaluate()"), True),
        (_AT_THE_END.format(evaluate="torch.no_grad()(evaluate)()"), False),
        (_FROZEN, False),
    ],
    ids=["each epoch", "each epoch, no_grad", "at the end", "at the end, no_grad", "trained in evaluation mode"],
)
def test_evaluation_with_gradients_is_noted(tmp_path: Path, loop: str, is_told: bool) -> None:
    """With the bytes it has computed at its fullest, and among the warnings of predictions."""
    trace = record_script(tmp_path, _EVALUATING_JOB.format(loop=loop)).trace
    notes = [note for note in trace.manifest.notes if note.startswith(GRADIENTS_ENABLED)]
    assert bool(notes) is is_told
    if is_told:
        assert "Run it under torch.no_grad()" in notes[0]
        assert notes[0] in step_warnings(trace, trace.fullest_step())
