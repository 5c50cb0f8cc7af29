"""Modules, phases and steps of a history, identified by stacks and annotations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memprof.trace.importers.called_modules import CalledModules, find_modules
from memprof.trace.importers.columns import Annotation
from memprof.trace.importers.frames import NO_STACK, Stack, StackTable
from memprof.trace.importers.phases import find_phases, step_table
from tests.trace.importers.writing import TRAIN, frame

MODULE = "/env/site-packages/torch/nn/modules"


def stack(*lines: str) -> list[dict[str, Any]]:
    """The frames of modules inside each other, the outermost first, each the line of its forward."""
    frames = list(TRAIN)
    for line in lines:
        call = [frame(f"{MODULE}/module.py:{n}", f) for n, f in ((1790, "_call_impl"), (1779, "_wrapped_call_impl"))]
        frames = [frame(line, "forward"), *call, *frames]
    return frames


def modules_of(*rows: Any, phases: str = "") -> CalledModules:
    """The modules of some stacks in one step, all in forward unless said otherwise (f, b)."""
    table = StackTable()
    stacks = [NO_STACK if frames is None else table.stack(frames) for frames in rows]
    names = {"f": "forward", "b": "backward"}
    phase = [names[letter] for letter in phases or "f" * len(rows)]
    return find_modules(stacks, np.zeros(len(rows), dtype=np.int64), np.array(phase, dtype=object))


def names_of(found: CalledModules) -> list[str]:
    """The name of the module of each row."""
    return [str(found.modules.name[module]) if module >= 0 else "" for module in found.module_id.tolist()]


def layers(lines: int, count: int) -> list[Any]:
    """The stacks of a model that calls a layer of some lines several times from its line 20."""
    return [stack("/job/net.py:20", f"/job/layer.py:{3 + line}") for _ in range(count) for line in range(lines)]


def test_a_line_further_up_is_the_next_layer() -> None:
    """A layer whose line jumps back to its first is called again: it has an index, and so has each call."""
    found = modules_of(*layers(3, 2), stack("/job/net.py:21", f"{MODULE}/linear.py:134"))
    assert names_of(found) == ["layer.py:3 forward.0"] * 3 + ["layer.py:3 forward.1"] * 3 + ["net.py:20 forward.linear"]
    assert found.calls.first_op_id.tolist() == [0, 0, 3, 6]
    assert found.calls.last_op_id.tolist() == [6, 2, 5, 6]
    assert found.calls.parent_call_id.tolist() == [-1, 0, 0, 0]
    assert found.modules.parent_id.tolist() == [-1, 0, 0, 0]


def test_a_loop_inside_forward_is_no_second_call() -> None:
    """A line that jumps back, but not to the first, is a loop of the module's own."""
    lines = [3, 4, 5, 4, 5]
    found = modules_of(*(stack("/job/net.py:20", f"/job/layer.py:{line}") for line in lines))
    assert names_of(found) == ["layer.py:3 forward"] * 5


def test_lines_of_one_statement_run_in_any_order() -> None:
    """The arguments of a call that spans lines run before the line of the call itself."""
    found = modules_of(*(stack("/job/net.py:20", f"/job/layer.py:{line}") for line in [6, 5, 8, 6, 5, 8]))
    assert names_of(found) == ["layer.py:5 forward.0"] * 3 + ["layer.py:5 forward.1"] * 3


def test_one_line_that_repeats_is_several_layers() -> None:
    """Layers whose forward is one line are told apart where what they call repeats."""
    inside = [f"{MODULE}/linear.py:134", f"{MODULE}/activation.py:816", f"{MODULE}/linear.py:134"]
    rows = [stack("/job/net.py:20", "/job/mlp.py:7", line) for _ in range(3) for line in inside]
    found = modules_of(*rows)
    kinds = ["linear.0", "activation", "linear.1"]
    assert names_of(found) == [f"mlp.py:7 forward.{layer}.{kind}" for layer in range(3) for kind in kinds]


def test_a_container_is_called_once_however_its_layers_repeat() -> None:
    """The loop of a Sequential is its own."""
    inside = [f"{MODULE}/linear.py:134", f"{MODULE}/activation.py:816"]
    found = modules_of(*(stack(f"{MODULE}/container.py:250", line) for _ in range(2) for line in inside))
    assert names_of(found) == [f"container.{kind}.{n}" for n in range(2) for kind in ("linear", "activation")]


def test_two_modules_of_one_class_are_told_apart_by_the_lines_that_call_them() -> None:
    """Their names say which line of the module around calls them."""
    found = modules_of(*(stack(f"/job/net.py:{line}", f"{MODULE}/normalization.py:217") for line in (20, 22)))
    assert names_of(found) == ["net.py:20 forward.normalization@20", "net.py:20 forward.normalization@22"]


def test_a_second_batch_runs_the_same_modules_again() -> None:
    """A row outside the model ends its call: the layers of the next one begin with 0."""
    found = modules_of(*layers(2, 2), TRAIN, *layers(2, 2))
    names = names_of(found)
    assert names[:4] == names[5:]
    assert names[4] == ""
    assert len(found.modules) == 3
    assert found.calls.parent_call_id.tolist().count(-1) == 2


def test_backward_runs_the_layers_again_last_first() -> None:
    """A layer that backward recomputes is the one of forward, counted from the last, whatever else was called since."""
    again = [stack("/job/layer.py:3"), stack("/job/layer.py:4")]
    found = modules_of(*layers(2, 2), TRAIN, stack("/job/other.py:9"), *again, None, *again, phases="ffffffbbbbb")
    names = names_of(found)
    assert names[6:] == [names[3], names[3], "", names[1], names[1]]
    assert found.calls.is_recompute.tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize(("function", "name"), [("forward", "Layer"), ("backward", "layer.py:4 forward")])
def test_the_class_is_read_off_the_source_where_it_is_the_one_that_ran(
    function: str, name: str, tmp_path: Path
) -> None:
    """A file whose line is in another function is not the one that ran: its name and line stand for the class."""
    (tmp_path / "layer.py").write_text(
        f"class Layer:\n    size = 3\n\n    def {function}(self, x):\n        return x\n"
    )
    line = 5 if function == "forward" else 4
    found = modules_of(stack(f"{tmp_path}/layer.py:{line}"))
    assert found.modules.type.tolist() == [name]


def test_a_deep_recursion_is_cut() -> None:
    """Hundreds of modules inside each other are a recursion, or made up."""
    found = modules_of(stack(*[f"/job/net.py:{line}" for line in range(1, 3000)]))
    assert len(found.modules) == 64


STEP = "Optimizer.step#AdamW.step"


def spans(*ends: tuple[bool, float]) -> list[Annotation]:
    """Returns starts (True) and ends (False) of optimizer steps."""
    return [Annotation(STEP, is_start, time_us) for is_start, time_us in ends]


def test_an_end_without_its_start_reaches_back_to_the_beginning() -> None:
    """A recording that begins within a step of the optimizer has its end alone; later spans have both."""
    python = Stack(is_python=True)
    times = np.arange(8.0)
    found = find_phases([python] * 8, times, spans((False, 1.0), (True, 4.0), (False, 5.0)))
    assert found.phase.tolist() == ["optimizer"] * 2 + ["other"] * 2 + ["optimizer"] * 2 + ["other"] * 2


def test_two_ends_in_a_row_both_reach_back() -> None:
    """The second end's start is missing too, and is not taken from the span before."""
    found = find_phases([Stack(is_python=True)] * 6, np.arange(6.0), spans((True, 0.0), (False, 1.0), (False, 3.0)))
    assert found.phase.tolist() == ["optimizer"] * 4 + ["other"] * 2


def test_what_a_stack_shows_takes_precedence_over_the_span() -> None:
    """A closure's backward within the optimizer's span is backward; a stack without Python is autograd's thread."""
    stacks = [Stack(is_python=True), Stack(phase="backward", is_python=True), NO_STACK, Stack(is_python=True)]
    found = find_phases(stacks, np.arange(4.0), spans((True, 0.0), (False, 3.0)))
    assert found.phase.tolist() == ["optimizer", "backward", "backward", "optimizer"]


def test_steps_end_where_the_optimizer_does() -> None:
    """Two ends make three steps; the first and the last are not whole, and the cut one is no step of its own."""
    stacks = [Stack(is_python=True)] * 9
    found = find_phases(stacks, np.arange(9.0), spans((True, 1.0), (False, 2.0), (True, 4.0), (False, 5.0)))
    assert found.how == "ends of Optimizer.step annotations"
    assert found.starts.tolist() == [0, 3, 6]
    assert found.step.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert found.is_whole.tolist() == [False, True, False]
    steps = step_table(found, np.arange(9.0), is_cut_off=True)
    assert steps.kind.tolist() == ["warm_up", "recorded", "recorded"]
    assert steps.start_us.tolist() == [0.0, 3.0, 6.0]
