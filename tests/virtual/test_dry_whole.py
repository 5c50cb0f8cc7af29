"""A dry run of a whole loop has the peak of the whole real run, and names its moment."""

from __future__ import annotations

from pathlib import Path

from memprof.analysis.report.whole_loop import find_loop_moments, moments_of
from memprof.trace.files.spool import WHOLE
from tests.recorder.recorded import record_script

#: A list grows in every second call, an update renews a basis every tenth time, an evaluation keeps its results.
_JOB = """
import torch
from torch import nn
torch.manual_seed(0)
class Renewed(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("step", 0)
            if p.ndim == 2 and state["step"] % 10 == 0:
                state["basis"] = torch.cat((p.grad @ p.grad.T,) * 12)[: p.shape[0]].clone()
            state["step"] += 1
            p.sub_(p.grad, alpha=1e-3)
kept = []
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    def forward(self, x):
        if GROWS:
            kept.append(x if len(kept) % 2 else None)
        return self.layers(x)
model = Net()
optimizer = Renewed(model.parameters(), {})
for step in range(25):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 17:
        with torch.no_grad():
            torch.cat([model(torch.randn(256, 64)) for _ in range(8)])
"""


def test_the_peak_of_each_moment_is_that_of_a_real_run(tmp_path: Path) -> None:
    """Updates and evaluations that come once are run, and what grows is run in full; other calls are skipped."""
    for grows, skips in ((False, True), (True, False)):
        script = _JOB.replace("GROWS", str(grows))
        real = record_script(tmp_path, script, "--skip", "0", "--steps", "25", name="real.memprof")
        dry = record_script(tmp_path, script, "--dry-run", "--whole", name="dry.memprof")
        both = [moments_of(real.trace), find_loop_moments(dry.trace)]
        measured, predicted = (
            [(each.name, each.moment.step, each.moment.allocated_bytes) for each in moments if skips]
            for moments in both
        )
        assert predicted == measured
        note = next(each for each in dry.trace.manifest.notes if each.startswith(WHOLE))
        assert ("; 0 calls" in note) is not skips
