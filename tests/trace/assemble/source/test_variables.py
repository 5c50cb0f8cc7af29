"""How long local variables of forward hold tensors is read off the order of operators and their source."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from memprof.trace.assemble.local_variables import forget_held, held_by_variables
from memprof.trace.schema import NONE
from memprof.trace.source_lines import forget_changed_sources, function_around, is_source_file, lines_of
from memprof.trace.step import Step
from tests.recorder.recorded import record

SCRIPT = """\
import torch
from torch import nn


def weighed(x):
    weights = torch.softmax(x[:, :5] @ x[:, :5].T, -1)
    out = weights @ x
    return out, weights


class Inner(nn.Module):
    def forward(self, x):
        return weighed(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(6, 24), nn.Linear(24, 6), Inner()

    def forward(self, x):
        wide = self.up(x)
        narrow = self.down(torch.relu(wide))
        narrow = torch.tanh(narrow)
        mixed, _ = self.inner(narrow)
        padded = torch.cat([mixed, mixed[:, :1]], 1)
        cut = padded * 2
        del padded
        return x + mixed * cut[:, :6].exp()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        x = self.embed(x).sin()
        for layer in self.layers:
            x = layer(x)
        return x.cos()


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(8, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Step:
    """A step of a job whose variables hold tensors in as many ways."""
    folder = tmp_path_factory.mktemp("variables")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return record(folder, script).trace.fullest_step()


def until(step: Step, name: str, module: str, text: str) -> str:
    """Returns the source line of the last operator up to which a variable holds a tensor, "" where none does.

    Args:
        step: The step.
        name: The operator that makes the tensor.
        module: Its module.
        text: In the source line of the script that runs it.
    """
    lines = SCRIPT.splitlines()

    def line_of(op: int) -> str:
        frame = next(one for one in step.stacks.frames[step.ops.stack_id[op]].splitlines() if "train.py" in one)
        return lines[int(frame.split(":")[-2]) - 1].strip()

    made = [
        int(step.storages.held_op_id[row])
        for row, op in enumerate(step.storages.created_op_id.tolist())
        if op != NONE
        and step.ops.phase[op] == "forward"
        and step.ops.name[op] == name
        and str(step.modules.name[step.ops.module_id[op]]).startswith(module)
        and text in line_of(op)
    ]
    assert len(made) == 1
    return "" if made[0] == NONE else line_of(made[0])


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        # Used by a later statement and never assigned again: until forward returns.
        ("aten.addmm.default", "self.up(x)", "return x + mixed * cut[:, :6].exp()"),
        # Inside a statement, no variable.
        ("aten.relu.default", "self.down(torch.relu(wide))", ""),
        # Until another tensor has the name.
        ("aten.addmm.default", "self.down(torch.relu(wide))", "narrow = torch.tanh(narrow)"),
        # Returned in a tuple to a name that nobody reads.
        ("aten._softmax.default", "weights = ", "return x + mixed * cut[:, :6].exp()"),
        # Until it is deleted.
        ("aten.cat.default", "padded = ", "cut = padded * 2"),
    ],
)
def test_variables_of_a_forward_hold_what_they_name(step: Step, name: str, text: str, line: str) -> None:
    """Each in its own way."""
    assert until(step, name, "layers.1", text) == line


def test_a_loop_assigns_again_with_each_call(step: Step) -> None:
    """What the loop begins with is let go when its first call has returned, not when the loop has ended."""
    op = next(op for op in range(len(step.ops)) if step.ops.name[op] == "aten.sin.default")
    row = step.storages.created_op_id.tolist().index(op)
    last = int(step.storages.held_op_id[row])
    assert str(step.modules.name[step.ops.module_id[last]]) == "layers.0"


def test_code_that_cannot_be_read_shows_nothing(tmp_path: Path) -> None:
    """A function made from text has no source."""
    script = tmp_path / "train.py"
    script.write_text(f"exec(compile({SCRIPT!r}, '<text>', 'exec'), dict(__name__='__main__'))\n")
    step = record(tmp_path, script).trace.fullest_step()
    is_made = (step.storages.created_op_id != NONE) & (step.storages.category == "activation")
    assert is_made.any()
    assert (step.storages.held_op_id[is_made] == NONE).all()


def held_again(step: Step) -> list[int]:
    """Follows the operators of a recorded step once more."""
    return held_by_variables(step.ops, step.storages, step.uses, step.module_calls, step.stacks).tolist()


def test_ranks_that_run_the_same_are_followed_once(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_held()
    fresh = held_again(step)
    monkeypatch.setattr("memprof.trace.assemble.local_variables._Followed", None)
    assert held_again(step) == fresh
    other = dataclasses.replace(step, ops=step.ops.replace(phase=np.full(len(step.ops), "backward", dtype=object)))
    with pytest.raises(TypeError):
        held_again(other)


@pytest.mark.parametrize("name", ["x" * 300 + ".py", "nothing\0.py", "folder.py", "notes.txt"])
def test_a_name_that_is_no_source_file_has_no_lines(tmp_path: Path, name: str) -> None:
    """Snapshots of others name files that cannot even be looked up: in a folder of root's, or with too long a name."""
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "notes.txt").write_text("one\n")
    assert lines_of(str(tmp_path / name)) == []


def test_a_source_that_may_not_be_read_has_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one that may not be looked up; whoever runs the tests may read all files, so the refusal is made up."""
    (tmp_path / "job.py").write_text("one\n")
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError))
    assert lines_of(str(tmp_path / "job.py")) == []
    monkeypatch.setattr(Path, "stat", Mock(side_effect=PermissionError))
    assert not is_source_file(str(tmp_path / "job.py"))


def test_a_source_that_has_changed_is_read_again(tmp_path: Path) -> None:
    source = tmp_path / "job.py"
    source.write_text("def f(x):\n    y = x\n    return y\n")
    assert function_around(str(source), 2) == (0, 3)
    assert not forget_changed_sources()
    source.write_text("\n\ndef f(x):\n    return x\n")
    assert function_around(str(source), 2) == (0, 3)
    assert forget_changed_sources()
    assert function_around(str(source), 4) == (2, 4)
    source.unlink()
    assert forget_changed_sources()
    assert function_around(str(source), 4) == (0, 0)
