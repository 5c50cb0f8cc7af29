"""A model that the job casts after its modules were first seen is recorded as it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.analysis.plans.predict import forecast
from memprof.policies.checkpoint.policy import Checkpoint
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from tests.recorder.recorded import record, record_script

_JOB = """
import torch
from torch import nn

encoder, model = nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
with torch.no_grad():
    rows = encoder(torch.ones(2, 64))  # every module is seen here
model.to(torch.bfloat16)
model[0].requires_grad_(False)
for parameter in model[1].parameters():
    parameter.data = parameter.data.float()  # as training scripts of diffusers cast what they train
optimizer = torch.optim.AdamW(model[1].parameters())
for step in range(8):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(rows).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("options", [(), ("--light",), ("--dry-run",)])
def test_modules_have_the_bytes_that_they_train_with(options: tuple[str, ...], tmp_path: Path) -> None:
    """Weights of the first layer take 2 bytes an element, those of the second 4."""
    modules = record_script(tmp_path, _JOB, *options).step.modules
    by_name = dict(zip(modules.name.tolist(), modules.parameter_bytes.tolist(), strict=True))
    assert by_name["Sequential.0"] == 2 * (64 * 64 + 64)
    assert by_name["Sequential.1"] == 4 * (64 * 64 + 64)


def test_its_plan_is_made_for_it(tmp_path: Path) -> None:
    """A plan from the recording is applied, not refused as one for another model."""
    plan = Plan((Checkpoint(modules=("1",)),))
    write_plan(tmp_path / "plan.toml", forecast(record_script(tmp_path, _JOB).trace, plan).plan)
    under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof")
    assert under.returncode == 0, under.stderr
    assert "exact" in under.stderr
