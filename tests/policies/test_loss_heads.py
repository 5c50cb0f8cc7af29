"""Heads that a search proposes to the chunked loss are those that it can be applied to."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.errors import PolicyError
from memprof.policies.loss.candidates import candidates
from memprof.policies.loss.policy import ChunkedLoss
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_file import write_plan
from tests.recorder.recorded import record

#: The head is in a container that casts, as for quantized models; in an adapter's layer; or plain.
_JOB = """
import torch
from torch import nn
from torch.nn import functional as F

class CastOutputToFloat(nn.Sequential):
    def forward(self, x):
        return super().forward(x).to(torch.float32)

class Adapted(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = base_layer, nn.Linear(16, 4), nn.Linear(4, 512)
    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))

Adapted.__name__ = "Linear"  # as in peft

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, head = nn.Linear(16, 16), nn.Linear(16, 512)
        self.lm_head = HEAD
    def forward(self, x):
        return self.lm_head(self.body(x))

torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(6):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(torch.ones(1024, 16)), torch.arange(1024) % 512)
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


@pytest.mark.parametrize(
    ("head", "found"),
    [
        ("CastOutputToFloat(head.bfloat16())", {"lm_head.0"}),
        ("CastOutputToFloat(head)", {"lm_head.0"}),
        ("CastOutputToFloat(head.double())", {"lm_head.0"}),
        ("head.double()", {"lm_head"}),
        ("Adapted(head)", set()),
        ("head", {"lm_head"}),
    ],
)
def test_heads_proposed_are_linears(head: str, found: set[str], tmp_path: Path) -> None:
    """A wrapper is not proposed, whatever its class is called; the Linear inside is, also where a cast follows."""
    text = _JOB.replace("HEAD", head)
    if "bfloat16" in head:
        text = text.replace("self.body(x)", "self.body(x).bfloat16()")
    if "double" in head:
        text = text.replace("self.body(x)", "self.body(x).double()")
    (tmp_path / "job.py").write_text(text)
    plain = record(tmp_path, "job.py")
    proposed = [one for one in candidates(plain.step, 1).whole_step if isinstance(one, ChunkedLoss)]
    assert {one.head for one in proposed} - {""} == found
    assert proposed[-1].head == ""
    for policy in proposed:
        write_plan(tmp_path / "plan.toml", Plan((policy,)))
        under = record(tmp_path, "--plan", "plan.toml", "job.py", name="under.memprof")
        assert list(map(float, under.stdout.split())) == pytest.approx(list(map(float, plain.stdout.split())))


def test_a_wrapper_named_as_the_head_is_refused_before_it_runs(tmp_path: Path) -> None:
    """The prediction refuses what could not be applied."""
    (tmp_path / "job.py").write_text(_JOB.replace("HEAD", "Adapted(head)"))
    with pytest.raises(PolicyError, match="name the Linear that does"):
        ChunkedLoss(8, head="lm_head").transform(record(tmp_path, "job.py").step)
