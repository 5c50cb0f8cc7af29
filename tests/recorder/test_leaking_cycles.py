"""Growth of which no variable is the holder: reference cycles, replaced tensors, arrays, and loops of evaluation."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import torch

from memprof.analysis.leaks.leak import describe_holder, leaks_of_host
from memprof.analysis.leaks.leaks import Leak, find_leaks
from memprof.recorder.memory.holders import find_holders
from memprof.trace.schema import NONE, HostHeap
from tests.recorder.recorded import record_script

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
