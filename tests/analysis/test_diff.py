"""Diffs: parts that sum to the whole whatever is compared, moments paired by phase, medians and ranks."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memprof.analysis.diff import summary_model as summaries
from memprof.analysis.diff.comparison import Change, Diff, compare, fold_layers, open_side
from memprof.analysis.diff.diff_tables import moved, rank_words
from memprof.analysis.diff.explain import explain, modules_of
from memprof.analysis.diff.gates import parse_gate
from memprof.analysis.diff.moved_lines import with_moved_lines
from memprof.analysis.diff.summary import Summary, read_summary, summarise, summary_to_json
from memprof.analysis.report.splits import KINDS, NOTHING
from memprof.cli.pages.diff.diff_data import diff_to_json
from memprof.cli.verbs.diff import FORMATS, render
from memprof.errors import InconclusiveError
from memprof.trace.manifest import Manifest
from memprof.trace.store import Trace
from tests.building import Module, Op, Storage, make_tables, make_trace
from tests.strategies import jobs

Job = tuple[list[list[Op]], list[Storage]]
SAMPLES = Path(__file__).parent.parent.parent / "sample_traces"


def summary_of(job: Job) -> Summary:
    steps, storages = job
    return summarise(make_trace(steps, storages))


def through_json(summary: Summary, most: int) -> Summary:
    """Writes a summary with only so many parts of each kind, and reads it back."""
    with patch.multiple(summaries, _MOST_AT_PEAK=most, _MOST_IN_PHASE=max(1, most - 1)):
        return read_summary(json.dumps(summary_to_json(summary)), "memory.json")


def assert_sums(found: Diff) -> None:
    """Asserts that the parts of every kind are the whole, on both sides and in what changed, in every moment."""
    for pair in (found.peak, *found.phases):
        for kind in KINDS:
            parts = pair.parts[kind]
            assert sum(part.base for part in parts) == pair.base_bytes
            assert sum(part.head for part in parts) == pair.head_bytes
            assert sum(part.bytes for part in parts) == pair.bytes
            assert len({part.name for part in parts}) == len(parts)
    assert found.focus in (found.peak, *found.phases)
    assert found.focus.name in ("peak", found.head.peak.phase)


@given(jobs(), jobs(), st.integers(1, 4), st.booleans(), st.booleans())
def test_parts_sum_to_the_whole(base: Job, head: Job, most: int, is_base_json: bool, is_head_json: bool) -> None:
    """Of any two jobs, in every moment and of every kind, also where a side comes from a committed file."""
    sides = [summary_of(base), summary_of(head)]
    for place, is_json in enumerate((is_base_json, is_head_json)):
        if is_json:
            sides[place] = through_json(sides[place], most)
    found = compare([sides[0]], [sides[1]])
    assert_sums(found)
    assert found.is_unchanged or found.base != found.head


@given(jobs(), st.integers(1, 4), st.booleans(), st.booleans())
def test_the_same_job_is_zero(job: Job, most: int, is_base_json: bool, is_head_json: bool) -> None:
    """Nothing changed, nothing is new or gone and nothing is explained, whatever was left out on the way."""
    sides = [
        through_json(summary_of(job), most) if is_json else summary_of(job) for is_json in (is_base_json, is_head_json)
    ]
    found = compare([sides[0]], [sides[1]])
    assert found.is_unchanged
    assert not found.has_moved
    assert not found.differences
    assert explain(found) == ()
    assert modules_of(found) == ()
    assert all(not part.bytes for pair in found.phases for parts in pair.parts.values() for part in parts)


@given(jobs(), jobs())
def test_every_form_can_be_written(base: Job, head: Job) -> None:
    """No change, however odd, ends in a traceback, and no form holds a number that is none."""
    found = compare([summary_of(base)], [summary_of(head)], warn=[parse_gate("activation>+5%")])
    json.dumps(diff_to_json(found, ("base", "head")), allow_nan=False)
    for form in set(FORMATS) - {"github"}:  # that one writes into the job's own summary
        text = render(found, form, 10, explains=True, names=("base", "head"))
        assert "nan" not in text.replace("native", "").lower().split()
        assert "inf %" not in text


def step(forward: int, backward: int) -> Job:
    """A step that holds so many bytes in forward and in backward, on top of 100 of a weight."""
    ops = [
        Op("aten.mm.default", module="fc", makes=["a"], reads=["w"], frees=["a"]),
        Op("aten.mm.default", "backward", "fc", makes=["b"], reads=["w"], frees=["b"]),
    ]
    storages = [
        Storage("w", 100, "parameter", "fc.weight", "fc"),
        Storage("a", forward, module="fc"),
        Storage("b", backward, "temporary", module="fc"),
    ]
    return [ops], storages


def test_a_peak_that_moved_is_told_in_the_phase_it_is_in_now() -> None:
    """Forward is compared with forward: bytes live in the base's backward do not count as savings in forward."""
    found = compare([summary_of(step(50, 80))], [summary_of(step(90, 80))])
    assert found.has_moved
    assert found.peak.bytes == 10
    assert found.focus.name == "forward"
    assert found.focus.bytes == 40
    assert {part.name: part.bytes for part in found.focus.parts["category"] if part.bytes} == {"activation": 40}
    assert moved(found) == "The peak moved from backward of fc (aten.mm.default) to forward of fc (aten.mm.default)."
    assert explain(found)[0].sentence.startswith("+40 B of activation memory in forward, +40 B in fc")


def test_a_phase_that_only_one_side_has_is_whole() -> None:
    """What was not there counts from nothing, without a percentage of it."""
    (ops,), storages = step(50, 80)
    only_forward = ([ops[:1]], storages[:2])
    found = compare([summary_of(only_forward)], [summary_of(step(50, 80))])
    assert_sums(found)
    backward = next(pair for pair in found.phases if pair.name == "backward")
    assert (backward.base, backward.base_bytes, backward.head_bytes) == (None, 0, 180)
    record = diff_to_json(found, ("base", "head"))
    told = next(pair for pair in record["phases"] if pair["name"] == "backward")
    assert told["change_ratio"] is None
    back = compare([summary_of(step(50, 80))], [summary_of(only_forward)])
    assert_sums(back)


def test_json_has_the_figures_of_both_sides_and_of_the_change() -> None:
    """Raw bytes and microseconds under the promised keys; what is not known, such as a hand-made step's time: null."""
    sides = [summary_of((ops * 3, storages)) for ops, storages in (step(50, 80), step(90, 80))]
    record = diff_to_json(compare(sides[:1], sides[1:]), ("a", "b"))
    base = {
        "name": "a",
        "recordings": 1,
        "peak_allocated_bytes": 180,
        "peak_in": "backward of fc",
        "step_time_us": None,
        "recompute_time_us": 0.0,
        "reserved_bytes": None,
        "plan": None,
        "rank_peaks": record["base"]["rank_peaks"],
    }
    assert record["base"] == base
    head = {**base, "name": "b", "peak_allocated_bytes": 190, "peak_in": "forward of fc"}
    assert record["head"] == {**head, "rank_peaks": record["head"]["rank_peaks"]}
    told = next(pair for pair in record["phases"] if pair["name"] == "forward")
    spot = {"bytes": 150, "phase": "forward", "module": "fc", "operator": "aten.mm.default", "line": None}
    assert (told["base"], told["head"]) == (spot, {**spot, "bytes": 190})
    assert (told["change_bytes"], told["change_ratio"]) == (40, 40 / 150)
    assert told["parts"]["category"] == [{"name": "activation", "base_bytes": 50, "head_bytes": 90, "change_bytes": 40}]


def test_nothing_on_a_side_is_no_percentage() -> None:
    """A base of zero bytes, and a gate on a share of it: any growth passes its bound, and no NaN is printed."""
    empty: Job = ([[Op("aten.view.default")]], [])
    found = compare([summary_of(empty)], [summary_of(step(50, 80))], fail=[parse_gate("peak>+2%")])
    assert_sums(found)
    assert found.is_failed
    text = render(found, "text", 10, explains=True, names=("base", "head"))
    assert "nan" not in text.lower()
    assert "inf" not in text.lower()
    assert not compare([summary_of(empty)], [summary_of(empty)], fail=[parse_gate("peak>+2%")]).is_failed


def test_of_several_recordings_the_medians_count() -> None:
    """Outliers on either side change nothing but the warning of how far they are apart."""
    bases = [summary_of(step(50, backward)) for backward in (80, 300, 82)]
    heads = [summary_of(step(50, backward)) for backward in (90, 88, 1)]
    found = compare(bases, heads, fail=[parse_gate("peak>+3%"), parse_gate("phase:backward>+3%")])
    assert (found.base.peak.bytes, found.head.peak.bytes) == (182, 188)
    assert [(verdict.base, verdict.head) for _, verdict in found.verdicts] == [(182, 188), (182, 188)]
    assert found.is_failed
    assert found.warnings == (
        "the 3 recordings of the base differ by 120.88 % in peak.",
        "the 3 recordings of the head differ by 21.28 % in peak.",
    )
    even = compare(bases[:2], heads[:2])
    assert even.base.peak.bytes == 180  # the lower of two


def test_the_rank_with_the_highest_peak_counts() -> None:
    """The others show their distance below it."""

    def ranked(*sizes: int) -> Summary:
        made = [
            (Manifest(target="train.py", rank=rank, world_size=len(sizes)), make_tables(*step(50, size)))
            for rank, size in enumerate(sizes)
        ]
        return summarise(Trace.of(made, "ranks.memprof"))

    base, head = ranked(80, 90, 60), ranked(80, 70, 120)
    assert base.rank_peaks == {"0": 180, "1": 190, "2": 160}
    found = compare([base], [head])
    assert_sums(found)
    assert found.peak.bytes == 30
    assert rank_words(found) == (
        "Worst rank: base rank 1 with 190 B, 30 B above the lowest; now rank 2 with 220 B, 50 B above the lowest."
    )
    assert [one.what for one in compare([base], [ranked(80, 70)]).differences] == ["world size"]


def test_a_batch_that_one_side_does_not_know_is_no_difference() -> None:
    """Where no input was seen as one, nothing can be said of it."""
    known = summary_of(step(50, 80))
    batched = dataclasses.replace(known, frame={**known.frame, "batch": "8x64"})
    assert compare([known], [batched]).differences == ()
    larger = dataclasses.replace(known, frame={**known.frame, "batch": "16x64"})
    assert [one.what for one in compare([batched], [larger]).differences] == ["batch"]


def test_other_models_do_not_compare() -> None:
    """The largest root says which model it is."""
    steps, storages = step(50, 80)
    sides = [summarise(make_trace(steps, storages, [Module("", name)])) for name in ("GPT", "ResNet")]
    with pytest.raises(InconclusiveError, match="the base is of GPT, the head of ResNet"):
        compare(sides[:1], sides[1:])
    assert [one.what for one in compare(sides[:1], sides[1:], any_model=True).differences] == ["model"]


@pytest.mark.parametrize(
    "wrapped",
    [
        [Module("", "OptimizedModule"), Module("_orig_mod", "GPT"), Module("_orig_mod.body", "Block")],
        [
            *(Module("", "DistributedDataParallel"), Module("module", "OptimizedModule")),
            *(Module("module._orig_mod", "GPT"), Module("module._orig_mod.body", "Block")),
        ],
        [
            *(Module("", "PeftModelForCausalLM"), Module("base_model", "LoraModel"), Module("base_model.model", "GPT")),
            *(Module("base_model.model.body", "Linear"), Module("base_model.model.body.base_layer", "Block")),
        ],
    ],
    ids=["compiled", "DDP of a compiled one", "PEFT"],
)
def test_a_wrapped_model_compares_with_the_model_inside(wrapped: list[Module]) -> None:
    """What a wrapper contains is the same model, its modules have the same names, and no byte is lost or moved.

    A tensor of each module is live: those of the wrappers are the model's.
    """
    inside = [Module("", "GPT"), Module("body", "Block")]
    sides = []
    for modules in (inside, wrapped):
        storages = [Storage(one.name, 64, "parameter", f"{one.name}.w", one.name) for one in modules]
        sides.append(summarise(make_trace([[Op(makes=["x"])]], [*storages, Storage("x", 8)], modules)))
    plain, outer = sides
    assert outer.model == "GPT"
    assert compare([plain], [outer]).differences == ()
    assert (
        outer.spots["peak"].parts["module"].keys()
        == plain.spots["peak"].parts["module"].keys()
        == {"GPT", "body", NOTHING}
    )
    assert sum(outer.spots["peak"].parts["module"].values()) == 64 * len(wrapped) + 8
    assert outer.spots["peak"].parts["storage"].keys() >= plain.spots["peak"].parts["storage"].keys()


def at_lines(*sizes: tuple[int, int]) -> Job:
    """A step whose tensors are made at lines of train.py: (line, bytes)."""
    ops = [
        Op("aten.mul.Tensor", makes=[f"t{line}"], stack=f"/job/train.py:{line}:main\n/job/start.py:1:main")
        for line, _ in sizes
    ]
    return [ops], [Storage(f"t{line}", size) for line, size in sizes]


def test_lines_that_only_moved_are_no_change() -> None:
    """A comment above everything moves every line and changes nothing."""
    base, head = at_lines((10, 100), (11, 200), (30, 50)), at_lines((11, 100), (12, 200), (31, 50))
    found = compare([summary_of(base)], [summary_of(head)])
    assert found.is_unchanged
    assert [part.name for part in found.peak.parts["source"]] == ["train.py:12", "train.py:11", "train.py:31"]


def test_a_new_line_among_moved_ones_is_the_change() -> None:
    """What is new is reported at its line; below it is what was there before."""
    base = at_lines((10, 100), (11, 200), (30, 50))
    head = at_lines((10, 100), (11, 70), (12, 200), (31, 50))
    found = compare([summary_of(base)], [summary_of(head)])
    assert_sums(found)
    assert {part.name: part.bytes for part in found.peak.parts["source"] if part.bytes} == {"train.py:11": 70}
    back = compare([summary_of(head)], [summary_of(base)])
    assert_sums(back)
    changes = {part.name: part.bytes for part in back.peak.parts["source"] if part.bytes}
    assert changes == {"train.py:11 (before)": -70}


def test_lines_that_grew_keep_their_order() -> None:
    """Where every line is larger, the first is still the first."""
    moved_lines = with_moved_lines({"a.py:1": 10, "a.py:2": 20, "b.py:7": 5}, {"a.py:3": 11, "a.py:4": 21, "b.py:7": 6})
    assert moved_lines == {"a.py:3": 10, "a.py:4": 20, "b.py:7": 5}


@given(
    st.dictionaries(st.integers(1, 12), st.integers(0, 3), max_size=8),
    st.dictionaries(st.integers(1, 12), st.integers(0, 3), max_size=8),
)
def test_moved_lines_keep_every_byte(base: dict[int, int], head: dict[int, int]) -> None:
    """Renaming makes no two lines one: the sizes are the same as before."""
    before, after = ({f"a.py:{line}": size for line, size in side.items()} for side in (base, head))
    before["(none)"] = 4
    found = with_moved_lines(before, after)
    assert sorted(found.values()) == sorted(before.values())
    assert found["(none)"] == 4
    assert with_moved_lines(before, before) == before


@pytest.mark.parametrize("name", ["gpt", "resnet", "lstm"])
def test_a_committed_summary_stands_for_its_recording(name: str, tmp_path: Path) -> None:
    """Against the file, the recording it was made of is unchanged, in both directions."""
    trace = SAMPLES / name / "run.memprof"
    summary = open_side(trace)
    path = tmp_path / "memory.json"
    path.write_text(json.dumps(summary_to_json(summary)))
    for sides in ((path, trace), (trace, path), (path, path)):
        base, head = map(open_side, sides)
        found = compare([base], [head])
        assert_sums(found)
        assert found.is_unchanged
        assert explain(found) == ()
    assert math.isfinite(summary.step_time_us)


def test_layers_that_changed_alike_share_a_row() -> None:
    """Their numbers are ranges, and all rows sum to the same; layers that changed otherwise have their own."""
    parts = [Change(f"layers.{number}", 0, 4 * 1024 if number != 2 else 1024) for number in range(5)]
    assert fold_layers([*parts, Change(NOTHING, 1024, 0)]) == (
        Change("layers.0-1,3-4", 0, 16 * 1024),
        Change("layers.2", 0, 1024),
        Change(NOTHING, 1024, 0),
    )


def test_ranges_name_no_layer_of_another_row() -> None:
    """All but one of nine blocks changed alike: ranges of both numbers would include that one."""
    names = [f"{stage}.{block}" for stage in range(3) for block in range(3)]
    parts = [Change(name, 0, 2 * 1024 if name == names[8] else 1024) for name in names]
    assert fold_layers(parts) == (parts[8], *parts[:8])
    alike = [Change(name, 0, 1024) for name in names]
    assert fold_layers(alike) == (Change("0-2.0-2", 0, 9 * 1024),)
