"""Growth through autograd graphs, whose variable is named, and growth of which no variable is the holder."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from memprof.analysis.leaks.leak import describe_holder, leaks_of_host
from memprof.analysis.leaks.leaks import Leak, LeakReport, find_leaks
from memprof.recorder.memory.holders import find_holders
from memprof.trace.schema import NONE, HostHeap
from tests.recorder.recorded import record, record_script

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


HEAD = """\
import gc, torch
gc.disable()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
def train(x):
    optimizer.zero_grad()
    out = model(x)
    out.square().mean().backward()
    optimizer.step()
    return out
"""


def leak_of(folder: Path, rest: str, line: int) -> Leak:
    """Records a job, and returns what a line of it makes and keeps."""
    report = find_leaks(record_script(folder, HEAD + rest, "-q").trace)
    return {leak.line: leak for leak in report.leaks}[f"job.py:{line}"]


class Node:
    """Refers to another one."""

    def __init__(self, tensor: torch.Tensor | None) -> None:
        self.tensor, self.link = tensor, None


def pair(tensor: torch.Tensor) -> Node:
    """Makes two nodes that refer to each other, one of them to a tensor."""
    first, second = Node(tensor), Node(None)
    first.link, second.link = second, first
    return first


def test_a_cycle_is_named_by_the_type_of_one_of_its_objects() -> None:
    """Only if nothing else refers to it: not while a variable does, nor something that the collector does not see."""
    tensors = [torch.zeros(1), torch.zeros(2), torch.zeros(3), torch.zeros(4)]
    pair(tensors[0])
    held = pair(tensors[1])
    own = Node(tensors[3])
    own.link = own
    del own
    gc.disable()
    try:
        found = find_holders(tensors)
    finally:
        gc.enable()
    del tensors
    assert (found[0].kind, found[0].chain, found[0].container) == ("cycle", "Node.tensor", "Node")
    assert found[1].kind != "cycle"
    assert held.link is not None
    assert found[2].kind in ("local", "unknown")
    assert (found[3].kind, found[3].chain) == ("cycle", "Node.tensor")
    gc.collect()


def test_a_search_keeps_nothing_alive() -> None:
    """What its callers refer to goes with them, without a collection: a step's tensors may be large."""

    def search() -> weakref.ref[torch.Tensor]:
        tensor = torch.ones(8)
        find_holders([torch.zeros(8)])
        return weakref.ref(tensor)

    gc.collect()
    gc.disable()
    try:
        assert search()() is None
    finally:
        gc.enable()


def test_an_output_in_its_own_context_is_in_a_cycle(tmp_path: Path) -> None:
    """What autograd's documentation warns of: the context holds the output, whose graph holds the context."""
    leak = leak_of(
        tmp_path,
        "class Copy(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        ctx.y = x.clone()\n"
        "        return ctx.y\n"
        "    @staticmethod\n"
        "    def backward(ctx, gradient):\n"
        "        return gradient\n"
        "for step in range(8):\n"
        "    train(Copy.apply(torch.ones(128, 64, requires_grad=True)))\n",
        14,
    )
    assert leak.bytes_per_step == 128 * 64 * 4
    assert leak.held_by is not None
    assert describe_holder(leak.held_by).startswith("`CopyBackward.y` (CopyBackward), in a reference cycle")


def test_a_history_that_is_joined_anew_has_its_variable(tmp_path: Path) -> None:
    """Each is of a shape of its own, so that there are never two of a kind."""
    leak = leak_of(
        tmp_path,
        "history = torch.zeros(0, 64)\n"
        "for step in range(8):\n"
        "    history = torch.cat([history, train(torch.ones(128, 64)).detach()])\n",
        13,
    )
    assert leak.bytes_per_step == 128 * 64 * 4
    assert leak.held_by is not None
    assert (leak.held_by.chain, leak.held_by.container) == ("history", "Tensor")


def test_the_graph_of_the_latest_output_does_not_hold_those_of_before(tmp_path: Path) -> None:
    """Arrays share the outputs' memory, and Python's collector does not see them: the holder is unknown."""
    leak = leak_of(
        tmp_path,
        "arrays = []\n"
        "for step in range(8):\n"
        "    out = train(torch.ones(128, 64))\n"
        "    arrays.append(out.detach().numpy())\n",
        7,
    )
    assert leak.bytes_per_step == 128 * 64 * 4
    assert leak.held_by is None


def test_growth_of_an_evaluation_shows_in_a_whole_run(tmp_path: Path) -> None:
    """Without an optimizer, each call of the model is a step; what holds arrays and Python objects is told as well."""
    script = "import numpy, torch\nmodel = torch.nn.Linear(64, 64)\nkept, arrays, seen = [], [], []\n"
    script += "with torch.no_grad():\n"
    script += "    for batch in range(200):\n        kept.append(model(torch.ones(128, 64)))\n"
    script += "        arrays.append(numpy.ones((128, 64)))\n"
    script += "        seen += [{'sample': str(one)} for one in range(100)]\n"
    trace = record_script(tmp_path, script, "-q", "--light").trace
    held = trace.table(HostHeap).held_bytes
    assert held.max() - held[held != NONE][0] > 150 * 128 * 64 * (4 + 8)
    report = find_leaks(trace)
    assert report.growth.bytes_per_step
    (leak,) = report.leaks[:1]
    assert (leak.shape, leak.held_by is not None and leak.held_by.chain.startswith("kept[")) == ("128x64", True)
    assert not [one for one in report.leaks if one.dtype != "float32"]
    holders = {one.dtype: one.held_by.chain.partition("[")[0] for one in leaks_of_host(trace) if one.held_by}
    assert holders == {"float32": "kept", "numpy.float64": "arrays", "Python objects": "seen"}
