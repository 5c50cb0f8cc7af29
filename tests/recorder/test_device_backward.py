"""Backward on a device runs in a thread of the engine's own: it is recorded as that of the processor is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from memprof.trace.step import Step
from memprof.trace.store import Trace

_JOB = Path(__file__).parent / "jobs" / "far_device.py"
#: What the job printed under some arguments, and a step.
Recorded = Callable[..., tuple[bytes, Step]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Records the job with some arguments, once; returns what it printed, and a step."""
    return cache(lambda *arguments: _recorded(tmp_path_factory.mktemp("job"), *arguments))


def _recorded(folder: Path, *arguments: str) -> tuple[bytes, Step]:
    output = folder / "run.memprof"
    command = [sys.executable, "-m", "memprof.cli.main", "record", "-q", "-o", str(output), str(_JOB), *arguments]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stderr == b""
    trace = Trace.open(output)
    assert trace.recorded_steps == (2, 3, 4)
    step = trace.steady_step()
    step.check()
    return done.stdout, step


def by_name(step: Step) -> list[tuple[str, str, str, int]]:
    """Returns module, name, phase and forward operator of each operator."""
    modules = [*step.modules.name.tolist(), "-"]
    ops = step.ops
    return [
        (modules[module], name, phase, forward)
        for module, name, phase, forward in zip(
            ops.module_id.tolist(), ops.name.tolist(), ops.phase.tolist(), ops.forward_op_id.tolist(), strict=True
        )
    ]


@pytest.mark.parametrize(
    "arguments", [(), pytest.param(("checkpoint",), marks=pytest.mark.slow), ("checkpoint", "reentrant")]
)
def test_backward_in_a_thread_of_its_own_is_recorded(recorded: Recorded, arguments: tuple[str, ...]) -> None:
    """Operators of the device's thread have their phase, their module and the forward operator they belong to."""
    plain = subprocess.run([sys.executable, str(_JOB), *arguments], capture_output=True, check=True)
    stdout, step = recorded(*arguments)
    assert stdout == plain.stdout
    rows = by_name(step)
    again = recomputed(step)
    for module in ("square", "again"):
        forward = {i for i, row in enumerate(rows) if row[0] == module and row[2] == "forward"}
        backward = [
            row[3]
            for i, row in enumerate(rows)
            if row[0] == module and row[2] == "backward" and row[1] == "aten.mul.Tensor" and i not in again
        ]
        assert len(backward) == 2
        assert set(backward) <= forward | again


def recomputed(step: Step) -> set[int]:
    """Returns the operators that run again."""
    return {int(row) for row in step.ops.op_id[step.ops.is_recompute]}


def test_recomputation_on_a_device_is_told(recorded: Recorded) -> None:
    """What a reentrant checkpoint runs again in the device's thread is marked, and its own backward belongs to it."""
    _, step = recorded("checkpoint", "reentrant")
    again = recomputed(step)
    assert [step.ops.name[row] for row in sorted(again)] == ["aten.mul.Tensor"]
    rows = by_name(step)
    assert [rows[row][0] for row in again] == ["again"]
    assert [row[1] for row in rows if row[3] in again] == ["aten.mul.Tensor", "aten.mul.Tensor", "aten.add.Tensor"]
    calls = step.module_calls
    assert calls.is_recompute.tolist().count(True) == 1
