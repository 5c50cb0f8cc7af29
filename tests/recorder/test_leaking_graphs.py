"""Where autograd graphs hold what stays, the variable whose graph grows is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.analysis.leaks.leak import describe_holder
from memprof.analysis.leaks.leaks import LeakReport, find_leaks
from tests.recorder.recorded import record

SUMMING = Path(__file__).parent / "jobs" / "summing.py"


def leaks_of(folder: Path, job: Path, *options: str, steps: int = 8) -> LeakReport:
    """Records a job in a process of its own and returns what grows in it."""
    return find_leaks(record(folder, "-q", *options, str(job), str(steps)).trace)


@pytest.mark.parametrize(("options", "steps"), [((), 8), (("--light",), 60)], ids=["recorded", "light"])
def test_the_graph_that_grows_is_named(tmp_path: Path, options: tuple[str, ...], steps: int) -> None:
    """What a summed loss keeps is found at the lines of the model, with the variable whose graph holds it."""
    report = leaks_of(tmp_path, SUMMING, *options, steps=steps)
    lines = {leak.line.rpartition(":")[2]: leak for leak in report.leaks}
    for number, line in enumerate(SUMMING.read_text().splitlines(), start=1):
        if expected := line.partition("  # ")[2]:
            held = lines[str(number)].held_by
            assert held is not None
            assert describe_holder(held).startswith(expected)
            assert held.place.startswith("summing.py:")
    assert lines["24"].module


CARRIED = """\
import sys
import torch
rnn, head = torch.nn.GRUCell(8, 32), torch.nn.Linear(32, 1)
parameters = [*rnn.parameters(), *head.parameters()]
optimizer = torch.optim.SGD(parameters, 0.01)
hidden = torch.zeros(64, 32)
for step in range(int(sys.argv[1])):
    hidden = rnn(torch.randn(64, 8), hidden)
    loss = head(hidden).square().mean()
    loss.backward(retain_graph=True)
    for parameter in parameters:
        parameter.grad = None
    optimizer.step()
"""


@pytest.mark.parametrize(("options", "steps"), [((), 8), (("--light",), 60)], ids=["recorded", "light"])
def test_a_state_that_carries_its_graph_is_named_not_the_loss_computed_from_it(
    tmp_path: Path, options: tuple[str, ...], steps: int
) -> None:
    """Both graphs reach back over all steps; that of the hidden state is the smaller one."""
    script = tmp_path / "train.py"
    script.write_text(CARRIED)
    report = leaks_of(tmp_path, script, *options, steps=steps)
    (held,) = {leak.held_by for leak in report.leaks if leak.line.endswith("train.py:8")}
    assert held is not None
    assert (held.chain, held.is_by_graph) == ("hidden", True)


AVERAGED = """\
import torch
class Summary:
    total = 0
class Reporter:
    def __init__(self):
        self.entries = {}
    def report(self, **values):
        for name, value in values.items():
            entry = self.entries.setdefault(name, Summary())
            entry.total = entry.total + value
class Average:
    def __init__(self, model):
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}
    def update(self, model):
        for name, one in model.named_parameters():
            self.shadow[name] = 0.9 * self.shadow[name] + one.tanh()
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
reporter, average = Reporter(), Average(model)
for step in range(8):
    out = model(torch.randn(64, 32))
    loss = out.square().mean()
    reporter.report(size=out.abs().mean())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update(model)
"""


def test_graphs_of_reported_sums_and_averages_are_each_found(tmp_path: Path) -> None:
    """A logger that sums a metric with its graph, and a moving average of weights, keep the graphs of all steps."""
    script = tmp_path / "train.py"
    script.write_text(AVERAGED)
    report = leaks_of(tmp_path, script)
    held = {leak.line.rpartition(":")[2]: leak.held_by for leak in report.leaks}
    for line, chain in (("21", "reporter.entries['size'].total"), ("16", "average.shadow['")):
        found = held[line]
        assert found is not None
        assert (found.chain.startswith(chain), found.is_by_graph) == (True, True)


UNRELATED = """\
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
scale = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
nodes, losses = [], []
for step in range(8):
    out = model(torch.randn(128, 64)).square()
    out.mean().backward(retain_graph=True)
    nodes.append(out.grad_fn)
    losses.append((scale * 2).sum())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_graph_of_a_tensor_that_was_computed_from_others_is_not_named(tmp_path: Path) -> None:
    """The nodes of one graph hold activations; the only tensor known to have a graph was computed without these."""
    script = tmp_path / "train.py"
    script.write_text(UNRELATED)
    report = leaks_of(tmp_path, script)
    held = {leak.line.rpartition(":")[2]: leak.held_by for leak in report.leaks}
    assert held["7"] is None
    assert held["10"] is not None
    assert held["10"].chain.startswith("losses[")


FLATTENED = """\
import torch
flat = torch.nn.Parameter(torch.randn(128))
optimizer = torch.optim.SGD([flat], 0.01)
class Model(torch.nn.Module):
    def forward(self, x):
        self.views = flat.split(64)
        first, second = self.views
        return (x @ first.view(8, 8)).tanh() @ second.view(8, 8)
model, outputs = Model(), []
for step in range(8):
    out = model(torch.randn(16, 8))
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    outputs.append(out.detach())
"""


def test_views_of_a_flat_parameter_that_was_updated_do_not_end_the_recording(tmp_path: Path) -> None:
    """Torch raises an error when the graph of such a view is read; those of other tensors are followed."""
    script = tmp_path / "train.py"
    script.write_text(FLATTENED)
    ended = record(tmp_path, str(script), "8")
    assert "failed" not in ended.stderr
    (held,) = {leak.held_by for leak in find_leaks(ended.trace).leaks}
    assert held is not None
    assert held.chain.startswith("outputs[")
