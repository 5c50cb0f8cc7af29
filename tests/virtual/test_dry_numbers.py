"""Numbers, assertions and random draws of a dry run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memprof.virtual.values import random_stream
from memprof.virtual.values.loops import passing_condition
from memprof.virtual.values.random_stream import RandomStream
from tests.recorder.recorded import record_both, record_script

_JOB = """
import torch
DEVICE = "cpu"

std = torch.Tensor([0.5]).to(DEVICE)  # before the first model
prior = torch.Tensor([std]).to(DEVICE)
model = torch.nn.Linear(4, 4).to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    loss = model(torch.randn(8, 4).to(DEVICE)).sum()
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    made = [torch.tensor([loss, 2.0]), torch.FloatTensor([[loss, loss]]), loss.new_tensor([loss]), loss.new([loss])]
    print("MADE", [tuple(each.shape) for each in made], float(prior.sum()))
    assert loss < -1e9, "a bound"
    assert loss < -1e9 and not loss > -1e9
    if loss < -1e9:
        raise ValueError("the comparison fails outside of assertions")
"""


_FAILING = """
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
labels = torch.tensor([0, 1, 5])
assert (labels < 4).all(), "a label is too large"
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lists_of_tensors_become_tensors_and_assertions_pass(tmp_path: Path, device: str) -> None:
    """Torch reads their elements without an operator; a job goes on behind its assertions, as a real one does."""
    options = ("--device", "rtx4090") if device == "cuda" else ()
    ended = record_script(tmp_path, _JOB.replace('"cpu"', repr(device)), "--dry-run", *options)
    assert ended.returncode == 0, ended.stderr
    assert "MADE [(2,), (1, 2), (1,), (1,)]" in ended.stdout


def test_an_assertion_on_known_values_fails(tmp_path: Path) -> None:
    """Labels are data: what is wrong with them ends the job, as without memprof."""
    ended = record_script(tmp_path, _FAILING, "--dry-run")
    assert ended.returncode == 1
    assert "AssertionError: a label is too large" in ended.stderr


class _Condition:
    """Notes the truth value with which the assertion that reads it passes, and returns it."""

    def __init__(self) -> None:
        self.passing: list[bool | None] = []

    def __bool__(self) -> bool:
        found = passing_condition(sys._getframe(1))
        self.passing.append(found)
        return bool(found)


#: As text, since pytest rewrites assertions.
_CONDITIONS = """
assert one
assert one, "a message"
assert not one
assert one and one
if one:
    raise ValueError("a branch is not an assertion")
assert bool(one) is False
"""


def test_conditions_of_assertions_are_recognized() -> None:
    """With a message, negated, each part of a conjunction; but neither a branch nor a call."""
    one = _Condition()
    exec(compile(_CONDITIONS, "job.py", "exec"), {"one": one})
    assert one.passing == [True, True, False, True, True, None, None]


_CELL = """
import torch

weight = torch.nn.Parameter(torch.ones(32, 32))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(6):
    memory = torch.ones(16, 32)
    for _ in range(4):
        memory = torch.tanh(memory @ weight)
        if torch.all(memory == 0.0):
            gate = memory[0]
        else:
            gate = torch.maximum(memory, torch.zeros_like(memory))
        memory = memory + gate
    memory.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_computed_state_is_not_all_zero(tmp_path: Path) -> None:
    """Cells of recurrent networks that begin with zeros treat their first step in another way (xLSTM's)."""
    real, dry = record_both(tmp_path, _CELL)
    assert dry.peak == real.peak
    assert dry.trace.fullest_step().ops.name.tolist() == real.trace.fullest_step().ops.name.tolist()


_LOOPS = """
import torch

def shrink(x):
    while True:
        x = torch.relu(x - 0.2)
        if torch.all(x == 0.0):
            print("shrunk")
            return x

weight = torch.nn.Parameter(torch.ones(8, 8))
optimizer = torch.optim.SGD([weight], lr=0.1)
for _ in range(4):
    x = torch.rand(4, 8) @ weight
    while not (x == 0).all():
        x = torch.relu(x - 0.2)
    x = shrink(torch.rand(4, 8) @ weight)
    for _ in range(3):
        if (x == 0).all().item():
            raise SystemExit("all zero")
    (x.sum() + weight.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_loops_that_go_on_until_all_is_zero_end(tmp_path: Path) -> None:
    """A condition that hardly ever holds would be false forever."""
    ended = record_script(tmp_path, _LOOPS, "--dry-run")
    assert ended.returncode == 0, ended.stderr
    assert set(ended.stdout.split()) == {"shrunk"}


_aten = torch.ops.aten


_LENGTHS = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.utils.data.TensorDataset(torch.arange(1, 65))
for step, (lengths,) in enumerate(torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)):
    longest = int(lengths.max()) + int(torch.randint(0, 64, ()))
    model(torch.randn(8, longest, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_batches_are_those_of_a_real_run(tmp_path: Path, seed: int) -> None:
    """Lengths, and the order of samples, are drawn after weights and dropout, from the same generator."""
    script = f"import torch\ntorch.manual_seed({seed})\n{_LENGTHS}"
    real = record_script(tmp_path, script, "--skip", "1", "--steps", "4", name="real.memprof")
    dry = record_script(tmp_path, script, "--dry-run", "--skip", "1", "--steps", "4", name="dry.memprof")
    peaks = real.trace.step_peaks()
    assert dry.trace.step_peaks() == peaks
    assert len(set(peaks.values())) > 1


@pytest.mark.parametrize("size", [5, 100, 2**20, 2**21 + 3, 3 * 2**20 + 64])
@pytest.mark.parametrize(("func", "settings"), [(_aten.normal_.default, (0.0, 0.02)), (_aten.uniform_.default, ())])
def test_large_tensors_are_drawn_in_parts(func: Any, settings: tuple[float, ...], size: int) -> None:
    """The generator is left as if they had been drawn at once."""
    torch.manual_seed(3)
    tensor = torch.empty(size)
    func(tensor, *settings)
    expected = torch.get_rng_state()
    torch.manual_seed(3)
    RandomStream().draw(func, (tensor, *settings), {}, tensor)
    assert torch.equal(torch.get_rng_state(), expected)


def test_no_more_is_drawn_than_a_dry_run_has_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor anything after a tensor that was too large, since the numbers would be others; a few are drawn even then."""
    monkeypatch.setattr(random_stream, "_MOST_DRAWN", 2 * random_stream.MOST_KEPT)
    stream = RandomStream()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for size in (2 * random_stream.MOST_KEPT + 1, random_stream.MOST_KEPT + 1):
        tensor = torch.empty(size)
        assert stream.draw(_aten.normal_.default, (tensor,), {}, tensor) is None
    assert torch.equal(torch.get_rng_state(), before)
    few = torch.empty(8)
    assert stream.draw(_aten.normal_.default, (few,), {}, few) is not None
