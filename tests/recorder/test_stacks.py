"""Python stacks by number."""

from __future__ import annotations

import gc
import sys
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from memprof.recorder.calls.stacks import StackTable
from memprof.trace.schema import NONE
from tests.recorder.conftest import Logged, RecordJob


def boundary(function: Any, *arguments: Any) -> Any:
    """Stands for torch's call method, where the inner part of a stack ends."""
    return function(*arguments)


def own_frame() -> FrameType:
    return sys._getframe(1)


def names(record: list[Any]) -> list[str]:
    """Returns the functions of a stack as written, innermost first."""
    return [frame.rpartition(":")[2] for frame in record[1]]


def test_a_stack_is_one_number_however_often_it_is_met(log: Logged) -> None:
    """The same lines called from the same place are one stack, another line is another."""
    stacks = StackTable(log, None)
    numbers = [stacks.number(own_frame(), -1) for _ in range(3)]
    other = stacks.number(own_frame(), -1)
    assert numbers == [0, 0, 0]
    assert other == 1
    assert len(log.texts("stacks")) == 2


def test_frames_are_written_innermost_first(log: Logged) -> None:
    """As file, line and function."""
    stacks = StackTable(log, None)

    def inner() -> None:
        stacks.number(own_frame(), -1)

    inner()
    parent, frames = log.texts("stacks")[0]
    line = inner.__code__.co_firstlineno + 1
    assert parent == -1
    assert frames[0] == f"{__file__}:{line}:inner"
    assert frames[1].endswith(":test_frames_are_written_innermost_first")


def test_a_stack_ends_at_the_module_call_around_it(log: Logged) -> None:
    """Its own part is what lies inside; the rest is the stack that made the call, by number."""
    stacks = StackTable(log, boundary.__code__)
    call = stacks.number(boundary(own_frame), -1)

    def operator() -> int:
        return stacks.number(own_frame(), call)

    def forward() -> int:
        return operator()

    number = boundary(forward)
    record = log.texts("stacks")[number]
    assert record[0] == call
    assert names(record) == ["operator", "forward"]


def test_the_call_itself_is_part_of_its_stack(log: Logged) -> None:
    """The stack of a module call starts in the call method, which does not end it at once."""
    stacks = StackTable(log, boundary.__code__)
    stacks.number(boundary(own_frame), -1)
    record = log.texts("stacks")[0]
    assert record[0] == -1
    assert names(record)[:2] == ["boundary", "test_the_call_itself_is_part_of_its_stack"]


def test_one_inner_part_under_two_calls_is_two_stacks(log: Logged) -> None:
    """A layer used twice: the operators inside are distinguished by the call around them."""
    stacks = StackTable(log, boundary.__code__)
    calls = [stacks.number(boundary(own_frame), -1), stacks.number(boundary(own_frame), -1)]
    assert calls == [0, 1]

    def forward(parent: int) -> int:
        return stacks.number(own_frame(), parent)

    assert [boundary(forward, parent) for parent in (0, 1, 0)] == [2, 3, 2]


def test_functions_that_are_gone_keep_their_stacks_apart(log: Logged) -> None:
    """A number stands for code objects; one that took a dead one's place in memory would else take its stack."""
    stacks = StackTable(log, None)
    found = []
    for number in range(50):
        scope: dict[str, Any] = {"table": stacks, "found": found, "own_frame": own_frame}
        exec(f"def f{number}():\n    found.append(table.number(own_frame(), -1))\nf{number}()", scope)
        del scope
        gc.collect(0)
    assert found == list(range(50))
    assert [names(record)[0] for record in log.texts("stacks")] == [f"f{number}" for number in range(50)]


def in_file(name: str, function: Any) -> CodeType:
    return function.__code__.replace(co_filename=name)


def test_a_stack_through_torchs_checkpoint_is_known(log: Logged) -> None:
    """So is every stack inside it, by its parent; a file of the user's own of that name elsewhere is none."""
    stacks = StackTable(log, boundary.__code__)

    def recompute(parent: int) -> int:
        return stacks.number(own_frame(), parent)

    recompute.__code__ = in_file("/site-packages/torch/utils/checkpoint.py", recompute)
    inside = boundary(recompute, -1)
    assert stacks.has_checkpoint(inside)

    def forward(parent: int) -> int:
        return stacks.number(own_frame(), parent)

    assert stacks.has_checkpoint(boundary(forward, inside))
    assert not stacks.has_checkpoint(boundary(forward, -1))
    forward.__code__ = in_file("/home/me/checkpoint.py", forward)
    assert not stacks.has_checkpoint(boundary(forward, -1))
    assert not stacks.has_checkpoint(-1)


def take(rows: int) -> torch.Tensor:
    """Returns a number, having taken a buffer of rows of 4 KiB."""
    return torch.empty(rows, 1024).fill_(1.0)[0, 0]


class Old(torch.autograd.Function):
    """A function in the older style."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * take(100)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * take(101)


class New(torch.autograd.Function):
    """A function with a context of its own, whose backward cannot be differentiated."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 * take(102)


def on_gradient(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * take(103)


def on_module(*_: Any) -> None:
    take(104)


def on_accumulated(_: torch.Tensor) -> None:
    take(105)


def unpack(tensor: torch.Tensor) -> torch.Tensor:
    take(106)
    return tensor


def again(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x * take(107))


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_memory_taken_by_python_in_backward_is_on_the_line_that_takes_it(record_job: RecordJob) -> None:
    """A function's own backward, hooks, and what unpacks; a checkpoint's recomputation is on forward's line."""

    def job() -> list[float]:
        torch.manual_seed(0)
        first, last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        first.register_full_backward_hook(on_module)
        last.weight.register_post_accumulate_grad_hook(on_accumulated)
        optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.1)
        losses = []
        for _ in range(3):
            x = New.apply(Old.apply(first(torch.ones(4, 8))))
            x.register_hook(on_gradient)
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
                x = x.cos()
            loss = last(checkpoint(again, x, use_reentrant=False)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    step = record_job(job).step(1)
    rows = {}
    for size, op in zip(step.storages.requested_bytes, step.storages.created_op_id, strict=True):
        if op != NONE and size % 4096 == 0:
            frames = str(step.stacks.frames[step.ops.stack_id[op]]).split("\n")
            taken_by = frames[1].rpartition(":")[2]
            rows.setdefault(size // 4096, []).append(
                (taken_by, str(step.ops.phase[op]), bool(step.ops.is_recompute[op]))
            )
    assert rows == {
        100: [("forward", "forward", False)],
        101: [("backward", "backward", False)],
        102: [("backward", "backward", False)],
        103: [("on_gradient", "backward", False)],
        104: [("on_module", "backward", False)],
        105: [("on_accumulated", "backward", False)],
        106: [("unpack", "backward", False)],
        107: [("again", "forward", False), ("again", "backward", True)],
    }
