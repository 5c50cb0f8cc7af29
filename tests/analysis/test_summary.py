"""Summaries: content, JSON round trip, and errors of damaged ones."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from memprof.analysis.diff.comparison import compare, open_side
from memprof.analysis.diff.summary import (
    OTHERS,
    PEAK,
    Summary,
    read_summary,
    summarise,
    summarise_step,
    summary_to_json,
)
from memprof.analysis.diff.summary_model import _fold_layers, _unfold_layers
from memprof.analysis.diff.traits import AGAIN, rounds_of, traits_of
from memprof.analysis.report.breakdown import by_category, by_module, by_op, by_source, hold_at
from memprof.analysis.report.module_tree import module_tree
from memprof.analysis.report.report import build_report
from memprof.analysis.report.sources import find_sources
from memprof.analysis.report.splits import KINDS, NOTHING, Splits
from memprof.errors import BadInputError
from memprof.policies.plan.prediction import input_shapes
from memprof.trace.manifest import Manifest
from memprof.trace.store import Trace
from tests.building import Module, Op, Storage, make_step, make_trace
from tests.strategies import jobs

SAMPLES = Path(__file__).parent.parent.parent / "sample_traces"
STACK = "/job/{file}:{line}:main"


@pytest.fixture(scope="module")
def gpt() -> Summary:
    return open_side(SAMPLES / "gpt" / "run.memprof")


@pytest.fixture(scope="module")
def record(gpt: Summary) -> dict[str, Any]:
    return record_of(gpt)


def record_of(summary: Summary) -> dict[str, Any]:
    """Returns its JSON as another process would load it."""
    loaded: dict[str, Any] = json.loads(json.dumps(summary_to_json(summary), allow_nan=False))
    return loaded


@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm"])
def test_what_is_read_back_is_what_was_written(name: str) -> None:
    """All but the smallest parts survive, and writing it once more changes nothing."""
    summary = open_side(SAMPLES / name / "run.memprof")
    record = record_of(summary)
    again = read_summary(json.dumps(record), "memory.json")
    assert record_of(again) == {**record, "lines": record_of(again)["lines"]}
    assert again.lines.keys() == record["lines"].keys()
    kept = ("name", "frame", "model", "plan", "maxima", "reserved_bytes", "parameter_bytes", "dtypes", "states")
    more = ("step_peaks", "start_bytes", "recomputed_ops", "rank_peaks", "is_complete", "traits")
    for field in (*kept, *more):
        assert getattr(again, field) == getattr(summary, field), field
    assert again.step_time_us == pytest.approx(summary.step_time_us, abs=0.06)
    assert again.spots.keys() == summary.spots.keys()
    for key, spot in again.spots.items():
        whole = summary.spots[key]
        assert dataclasses.replace(spot, parts={}) == dataclasses.replace(whole, parts={}, file="")
        for kind in KINDS:
            told = {part: size for part, size in spot.parts[kind].items() if part != OTHERS}
            assert told.items() <= whole.parts[kind].items()
            assert sum(spot.parts[kind].values()) == whole.bytes


def test_unknown_times_stay_unknown(gpt: Summary) -> None:
    """JSON has no NaN: what is not known is null, and read back it is not known."""
    record = record_of(dataclasses.replace(gpt, step_time_us=math.nan, recompute_time_us=math.nan))
    assert record["step_time_us"] is None
    again = read_summary(json.dumps(record), "memory.json")
    assert math.isnan(again.step_time_us)
    assert math.isnan(again.recompute_time_us)


@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm"])
def test_a_summary_is_a_few_kilobytes_without_folders(name: str) -> None:
    """Small enough to be committed, and without the job's folder."""
    text = json.dumps(record_of(open_side(SAMPLES / name / "run.memprof")))
    assert len(text) < 20_000
    assert "/root" not in text
    assert str(SAMPLES) not in text


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Lists every place in JSON that must hold something: the keys that the format names."""
    free = ("frame", "maxima", "dtypes", "rank_peaks", "lines", "traits", "parts", "states", "step_peaks")
    found = []
    for key, item in value.items():
        found.append((*path, key))
        if isinstance(item, dict) and key not in free:
            found += _paths(item, (*path, key))
    return found


def _broken(record: dict[str, Any], path: tuple[Any, ...], change: Callable[[dict[str, Any], Any], None]) -> str:
    copied = json.loads(json.dumps(record))
    place = copied
    for key in path[:-1]:
        place = place[key]
    change(place, path[-1])
    return json.dumps(copied)


def test_every_missing_key_and_every_other_type_is_one_sentence(record: dict[str, Any]) -> None:
    """Wherever a summary is damaged, the sentence names the file; no figure is made up instead."""
    paths = [path for path in _paths(record) if path[0] != "memprof_summary"]
    paths += [("traits", key) for key in record["traits"]]
    phases = [("spots", name) for name in record["spots"] if name != PEAK]
    for path in paths:
        # A job may lack a phase, earlier versions these keys.
        if path not in (*phases, ("growth_bytes",), ("host_bytes",), ("lower_bound",)):
            with pytest.raises(BadInputError, match=r"^memory\.json "):
                read_summary(_broken(record, path, lambda place, key: place.pop(key)), "memory.json")
        for wrong in ([[None]], {"x": [None]}):
            with pytest.raises(BadInputError, match=r"^memory\.json "):
                read_summary(
                    _broken(record, path, lambda place, key, put=wrong: place.update({key: put})), "memory.json"
                )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spots", PEAK, "bytes"), True),
        (("spots", PEAK, "bytes"), 1.5),
        (("spots", PEAK, "bytes"), "1"),
        (("spots", PEAK, "phase"), 1),
        (("parameter_bytes",), None),
        (("step_time_us",), "fast"),
        (("step_time_us",), math.inf),
        (("spots", PEAK, "phase"), "warm-up"),
        (("step_peaks",), ["1"]),
        (("step_peaks",), "12"),
        (("step_peaks",), []),
        (("states",), [1]),
        (("states",), "exp_avg"),
        (("rank_peaks",), {}),
        (("rank_peaks",), {"0": None}),
        (("frame",), {"torch": 2}),
        (("lines",), {"train.py:1": ["train.py"]}),
        (("is_complete",), "no"),
        (("traits", "modules"), {"Linear": "1"}),
        (("traits", "parameters"), {"weight": 1}),
        (("traits", "operators"), {"forward": {"aten.mm.default": None}}),
        (("traits", "held"), {"train.py:1": [1]}),
        (("traits", "outside"), {"8x8": [1, "2"]}),
        (("traits", "growth_bytes"), 0.5),
    ],
)
def test_values_that_make_no_sense_are_refused(record: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """A number where a text is due, a text where a number is due, nothing where something must be."""
    text = _broken(record, path, lambda place, key: place.update({key: value}))
    with pytest.raises(BadInputError, match=r"^memory\.json is damaged"):
        read_summary(text, "memory.json")


def test_parts_that_do_not_sum_are_refused(record: dict[str, Any]) -> None:
    """A byte more in one part of any kind, in any moment."""
    for name, spot in record["spots"].items():
        for kind in KINDS:
            first = next(iter(spot["parts"][kind]))
            text = _broken(
                record,
                ("spots", name, "parts", kind, first),
                lambda place, key: place.update({key: place[key] + 1}),
            )
            with pytest.raises(BadInputError, match=rf"^memory\.json is damaged: .* the parts by {kind}"):
                read_summary(text, "memory.json")


@pytest.mark.parametrize("text", ["", "[]", "1", "null", "[" * 100_000, '{"memprof_summary": true}', '{"a": NaN}'])
def test_other_json_is_no_summary(text: str) -> None:
    """Whatever the file holds, the sentence names it."""
    with pytest.raises(BadInputError, match=r"^memory\.json is "):
        read_summary(text, "memory.json")


@given(jobs())
def test_splits_are_those_of_the_breakdowns(job: tuple[list[list[Op]], list[Storage]]) -> None:
    """At every operator the parts by name are those that a single moment is split into, and they sum to the whole."""
    steps, storages = job
    step = make_trace(steps, storages).step(0)
    sources, tree = find_sources(step.stacks), module_tree(step.modules)
    splits = Splits(step, sources, tree)
    for op_id in range(len(step.ops)):
        holding = hold_at(step, op_id)
        parts = splits.at(holding)
        assert parts.keys() == set(KINDS)
        for kind, split, name_of in (
            ("category", by_category(holding), str),
            ("module", by_module(holding, tree), tree.title),
            ("op", by_op(holding), str),
            ("source", by_source(holding, sources), lambda line: line.place),
        ):
            expected: dict[str, int] = {}
            for part in split.parts:
                name = NOTHING if part.key is None else name_of(part.key)
                expected[name] = expected.get(name, 0) + part.bytes
            assert parts[kind] == {name: size for name, size in expected.items() if size}
        for sizes in parts.values():
            assert sum(sizes.values()) == holding.total_bytes
        assert len(parts["storage"]) == len(holding.rows) + bool(holding.workspace_bytes)


def test_storages_are_named_by_what_made_them_and_counted() -> None:
    """Owned ones by their name; others by module and operator, in order of birth; those from before by category."""
    ops = [
        Op("aten.mm.default", module="fc", makes=["a"], reads=["w"]),
        Op("aten.mm.default", module="fc", makes=["b"], reads=["a"], workspace=5),
    ]
    storages = [
        Storage("w", 100, "parameter", "fc.weight", "fc"),
        Storage("old", 7, "unknown"),
        Storage("a", 10, module="fc"),
        Storage("b", 20, module="fc"),
    ]
    summary = summarise_step(make_step(ops, storages, [Module("", "Net"), Module("fc")]))
    assert summary.peak.parts["storage"] == {
        "parameter fc.weight #1": 100,
        "unknown #1": 7,
        "fc aten.mm.default #1": 10,
        "fc aten.mm.default #2": 20,
        "workspace of aten.mm.default": 5,
    }


def test_what_one_operator_makes_at_once_has_no_order() -> None:
    """Two recordings may list the outputs of an operator either way round, and are the same all the same."""
    sides = []
    for outputs in (["mean", "out"], ["out", "mean"]):
        ops = [
            Op("aten.native_layer_norm.default", module="norm", makes=outputs),
            Op("aten.mm.default", makes=["late"]),
        ]
        sizes = {"mean": 8, "out": 512}
        storages = [*[Storage(key, sizes[key], module="norm") for key in outputs], Storage("late", 4, module="norm")]
        sides.append(summarise_step(make_step(ops, storages)).peak.parts["storage"])
    assert sides[0] == sides[1]
    assert sides[0]["norm aten.native_layer_norm.default #1"] == 8


def test_traits_tell_what_a_step_is_like() -> None:
    """Numbers worked out by hand: what stays, what grows, what is held by a name, what runs again."""
    ops = [
        Op(
            "aten.mm.default",
            module="layers.0",
            makes=["a"],
            reads=["x", "w"],
            saves=["a"],
            stack=STACK.format(file="m.py", line=3),
        ),
        Op(
            "aten.mm.default",
            module="layers.1",
            makes=["b"],
            reads=["a"],
            saves=["b"],
            stack=STACK.format(file="m.py", line=3),
        ),
        Op("aten.clone.default", makes=["c"], reads=["b"], stack=STACK.format(file="log.py", line=9)),
        Op("aten.mm.default", "backward", "layers.1", reads=["b"], forward=1, frees=["b"]),
        Op("aten.mm.default", "backward", "layers.0", reads=["x"], is_recompute=True),
        Op("aten.mm.default", "backward", "layers.0", reads=["a"], forward=0),
        Op("aten.add_.Tensor", "optimizer", mutates=["w"]),
    ]
    storages = [
        Storage("w", 400, "parameter", "layers.0.weight", "layers.0", shape="10x10"),
        Storage("x", 40, "input", shape="1x10"),
        Storage("average", 400, "input", shape="10x10"),
        Storage("a", 50, module="layers.0"),
        Storage("b", 60, module="layers.1"),
        Storage("c", 70, "temporary"),
    ]
    step = make_step(ops, storages, [Module("", "Net"), Module("layers.0", "Layer"), Module("layers.1", "Layer")])
    traits = traits_of(step, find_sources(step.stacks))
    assert traits.modules == {"Layer": 2, "Linear": 1, "Net": 1}  # the list of layers is made by the builder
    assert traits.parameters == {"layers.*.weight": "10x10"}
    assert traits.operators == {
        "forward": {"aten.mm.default": 2, "aten.clone.default": 1},
        "backward": {"aten.mm.default": 2},
        AGAIN: {"aten.mm.default": 1},
        "optimizer": {"aten.add_.Tensor": 1},
    }
    assert (traits.saved_bytes, traits.graph_bytes) == (110, 50)
    assert traits.unread_bytes == 0
    assert traits.held == {"log.py:9": (1, 70), "m.py:3": (1, 50)}
    assert traits.outside == {"10x10": (1, 400), "1x10": (1, 40)}
    assert traits.growth_bytes == 120
    assert input_shapes(step) == ("1x10",)  # the average is there, but forward does not read it


def test_a_loss_in_chunks_is_one_micro_batch() -> None:
    """Several rounds of backward after one call of the model do not make several micro-batches of it."""
    chunked = [
        Op(module="fc", makes=["a"]),
        Op("loss", makes=["p"], frees=["p"]),
        Op("loss", "backward"),
        Op("loss", makes=["q"], frees=["q"], micro_batch=1),
        Op("loss", "backward", frees=["a"], micro_batch=1),
    ]
    storages = [Storage(key, 8) for key in "apq"]
    assert rounds_of(make_step(chunked, storages)) == 1
    split = [
        Op(module="fc", makes=["a"], frees=["a"]),
        Op("loss", "backward"),
        Op(module="fc", makes=["p"], frees=["p"], micro_batch=1),
        Op("loss", "backward", micro_batch=1),
    ]
    assert rounds_of(make_step(split, storages[:2])) == 2
    without_modules = [dataclasses.replace(op, module=None) for op in chunked]
    assert rounds_of(make_step(without_modules, storages)) == 2


def test_a_recording_without_operators_has_no_summary(tmp_path: Path) -> None:
    """A recording without steps is refused with a message."""
    with pytest.raises(BadInputError):
        summarise(make_trace([[]], []))
    with pytest.raises(BadInputError):
        summarise(Trace.open(tmp_path))


def _layered(small: int) -> Summary:
    """24 layers of 13 modules each, and 60 other modules; the last one keeps the given bytes."""
    layers = [f"layers.{layer}.block.{part}" for layer in range(24) for part in range(13)]
    others = [f"branch_{letter}" for letter in range(60)]
    sizes = {name: 1024 * (1 + int(name.rpartition(".")[2])) for name in layers}
    sizes |= {name: 512 + place for place, name in enumerate(others)} | {others[-1]: small}
    storages = [Storage(name, size, module=name) for name, size in sizes.items()]
    ops = [Op("aten.mm.default", module=name, makes=[name]) for name in sizes]
    modules = [Module("", "Net"), *(Module(name) for name in sizes)]
    return summarise(make_trace([ops], storages, modules=modules))


def test_a_small_module_that_grows_is_named_though_the_base_is_a_summary() -> None:
    """Layers of equal size are one entry of the file, which stays small, and each by itself when it is read."""
    base, head = _layered(small=4), _layered(small=48 << 20)
    record = record_of(base)
    parts = record["spots"][PEAK]["parts"]["module"]
    assert parts["layers.0-23.block.12"] == 24 * 13 * 1024
    assert len(json.dumps(record, indent=1)) < 24_000
    again = read_summary(json.dumps(record), "memory.json")
    assert again.peak.parts["module"] == base.peak.parts["module"]
    found = compare([again], [head])
    assert [(one.name, one.base, one.head) for one in found.peak.parts["module"] if one.bytes] == [
        ("branch_59", 4, 48 << 20)
    ]


@pytest.mark.parametrize(
    ("parts", "folded"),
    [
        ({"a.0": 4, "a.1": 4, "a.3": 4, "b": 4}, {"a.0-1,3": 12, "b": 4}),
        ({"a.00": 4, "a.01": 4}, {"a.00": 4, "a.01": 4}),  # not as a list numbers its modules
        ({"a.0-1": 6, "a.2": 2}, {"a.2": 2, OTHERS: 6}),  # a module that is called like a range
        ({"a.0.b.0": 4, "a.0.b.1": 4, "a.1.b.0": 4}, {"a.0.b.0": 4, "a.0.b.1": 4, "a.1.b.0": 4}),
    ],
)
def test_ranges_of_layers_stand_for_these_and_no_others(parts: dict[str, int], folded: dict[str, int]) -> None:
    """Whatever modules are called, what is read back is named as it was, or among the others."""
    assert _fold_layers(parts) == folded
    named = {name: size for name, size in parts.items() if OTHERS not in folded or name in folded}
    assert _unfold_layers(folded) == named | {name: size for name, size in folded.items() if name == OTHERS}


def test_a_range_of_too_many_layers_is_damage(record: dict[str, Any]) -> None:
    """A line of text does not become a billion names."""
    broken = json.loads(json.dumps(record))
    parts = broken["spots"][PEAK]["parts"]["module"]
    parts["layers.0-999999999"] = parts.pop("layers.0-3")
    with pytest.raises(BadInputError, match="names too many modules"):
        read_summary(json.dumps(broken), "memory.json")


def test_own_categories_are_those_of_the_report() -> None:
    """A pattern also names what an earlier step allocated, in a comparison as in a report."""
    manifest = Manifest(target="train.py", categories=("cache=fill",))
    update = Op(phase="optimizer", name="aten.add_.Tensor")
    trace = make_trace(
        [
            [Op(makes=("kept",), stack="train.py:9:fill"), update],
            [Op(makes=("new",), stack="train.py:5:main"), update],
        ],
        [Storage("kept", 512), Storage("new", 64)],
        manifest=manifest,
    )
    report = build_report(trace, step_number=trace.fullest_step().number)
    in_report = {part.key: part.bytes for part in report.at_peak.by_category.parts}
    assert in_report["cache"] == 512
    summary = summarise(trace)
    assert summary.peak.parts["category"]["cache"] == 512
    assert summary.maxima["cache"] == report.category_maxima["cache"].maximum_bytes
