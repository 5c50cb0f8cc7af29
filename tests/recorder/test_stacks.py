"""Python stacks by number."""

from __future__ import annotations

import gc
import sys
from types import CodeType, FrameType
from typing import Any

from memprof.recorder.calls.stacks import StackTable
from tests.recorder.conftest import Logged


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
