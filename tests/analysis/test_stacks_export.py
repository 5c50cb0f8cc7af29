"""Flame graphs for speedscope: its own schema, and the bytes of a moment, to the byte."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from memprof.analysis.export.stacks_export import export_stacks
from memprof.analysis.report.breakdown import by_category, hold_at
from memprof.errors import UsageError
from memprof.replay.live import peak_op
from memprof.trace.store import Trace
from tests.building import Module, Op, Storage, make_trace

SAMPLES = sorted(Path(__file__).parents[2].glob("sample_traces/*/run.memprof"))
SCHEMA = json.loads((Path(__file__).parent / "speedscope" / "file-format-schema.json").read_text())


def read(content: bytes) -> dict[str, Any]:
    """Returns a file that speedscope's schema allows."""
    file: dict[str, Any] = json.loads(content)
    jsonschema.validate(file, SCHEMA)
    return file


def bytes_by_stack(file: dict[str, Any], place: int) -> Counter[tuple[str, ...]]:
    frames, profile = file["shared"]["frames"], file["profiles"][place]
    found: Counter[tuple[str, ...]] = Counter()
    for stack, weight in zip(profile["samples"], profile["weights"], strict=True):
        found[tuple(frames[frame]["name"] for frame in stack)] += weight
    return found


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_each_graph_sums_to_the_peak(path: Path) -> None:
    """Both graphs of a sample are what its schema asks for, and hold every byte of the peak, by category too."""
    trace = Trace.open(path)
    step = trace.steady_step()
    exported = export_stacks(trace)
    file = read(exported.content)
    holding = hold_at(step, peak_op(step))
    assert exported.total_bytes == holding.total_bytes
    expected = {part.key: part.bytes for part in by_category(holding).parts}
    categories = set(expected)
    for place, profile in enumerate(file["profiles"]):
        assert profile["endValue"] == sum(profile["weights"]) == holding.total_bytes
        found: dict[str | None, int] = {}
        for stack, weight in bytes_by_stack(file, place).items():
            category = next(name for name in reversed(stack) if name in categories)
            found[category] = found.get(category, 0) + weight
        assert found == expected


def small() -> Trace:
    """Before the step w, 400 bytes of layers.0; x, 100 bytes, made in f called by main; 7 bytes of workspace."""
    return make_trace(
        [
            [
                Op("aten.relu.default", makes=["x"], module="layers.0", stack="/j/a.py:7:f\n/j/b.py:3:main"),
                Op("aten.mul.Tensor", phase="backward", reads=["x"], frees=["x"], workspace=7),
                Op("aten.add_.Tensor", phase="optimizer"),
            ]
        ],
        [Storage("w", 400, "parameter", "layers.0.w", module="layers.0"), Storage("x", 100, module="layers.0")],
        [Module("", "Net"), Module("layers", "Sequential"), Module("layers.0")],
    )


def test_frames_are_the_code_outermost_first() -> None:
    """By hand, at operator 1: who called whom, the operator and what for; or what was there before."""
    file = read(export_stacks(small()).content)
    assert bytes_by_stack(file, 0) == {
        ("main", "f", "aten.relu.default", "activation"): 100,
        ("allocated before the step", "parameter", "layers.0.w"): 400,
        ("without a stack", "aten.mul.Tensor", "workspace"): 7,
    }
    assert {"name": "f", "file": "/j/a.py", "line": 7} in file["shared"]["frames"]
    assert "(the peak)" in file["name"]


def test_modules_stand_below_those_that_hold_them() -> None:
    """By hand: the module's path, then the category."""
    path = ("Net", "layers (Sequential)", "layers.0 (Linear)")
    assert bytes_by_stack(read(export_stacks(small()).content), 1) == {
        (*path, "activation"): 100,
        (*path, "parameter"): 400,
        ("outside any module", "workspace"): 7,
    }


def test_another_moment() -> None:
    """At the last operator the parameter alone is left; one that is not there is refused."""
    exported = export_stacks(small(), 0, 2)
    assert exported.total_bytes == 400
    assert "the peak" not in json.loads(exported.content)["name"]
    with pytest.raises(UsageError, match="operators 0 to 2"):
        export_stacks(small(), 0, 3)
