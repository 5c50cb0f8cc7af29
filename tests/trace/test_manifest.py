"""The format: its manifest, its page, names of phases, and traces of every schema version released."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memprof.errors import BadInputError
from memprof.phases import MOST_NAMES, PHASES
from memprof.replay.live import live_bytes
from memprof.trace.manifest import Backend, Capture, Machine, Manifest, Window, number_ranks
from memprof.trace.schema import SCHEMA_VERSION, TABLES, HostMemory, Ops, Segments, reference
from memprof.trace.store import Trace, write_trace
from tests.building import Op, Storage, assert_tables_equal, make_tables
from tests.trace.golden.make_golden import golden_manifest, golden_tables

FULL = Manifest(
    memprof_version="1.2",
    torch_version="2.13.0",
    python_version="3.11.7",
    created_us=1.5e15,
    command=("python", "train.py", "--lr", "0.1"),
    target="train.py",
    machine=Machine(device_name="H100", device_kind="cuda", cores=8, memory_bytes=2**40, capacity_bytes=80 * 2**30),
    rank=3,
    world_size=8,
    pid=77,
    plan={"policies": [{"name": "recompute"}]},
    backend=Backend(name="cpu-native", sees=("allocations",), blind_spots=("pinned memory", "other libraries")),
    capture=Capture(is_complete=False, ends_at="step 3, backward", reason="killed", exit_status=-9),
    window=Window(skip=1, steps=5, stop=True),
    op_times="timed step 5",
    notes=("one", "two"),
    same_ranks=(0, 7),
)


def test_manifest_survives_json() -> None:
    """A manifest written as JSON comes back equal, tuples and None included."""
    assert Manifest.from_json(json.loads(json.dumps(FULL.to_json()))) == FULL
    assert Manifest.from_json(json.loads(json.dumps(Manifest().to_json()))) == Manifest()


def test_unknown_keys_are_ignored_and_missing_ones_defaulted() -> None:
    """A manifest of another version within the schema is read, as one with what older versions read off the source."""
    record = {"rank": 2, "created_us": 5, "own_casts": [0, 7], "machine": {"cores": 4, "colour": "blue"}}
    assert Manifest.from_json(record) == Manifest(rank=2, created_us=5.0, machine=Machine(cores=4))


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"rank": "one"}, "'rank' holds no int"),
        ({"rank": True}, "'rank' holds no int"),
        ({"command": "python train.py"}, "'command' holds no tuple"),
        ({"command": [1]}, "'command' holds no tuple"),
        ({"machine": []}, "'machine' holds no Machine"),
        ({"machine": {"cores": None}}, "'cores' holds no int"),
        ({"plan": 3}, "'plan' holds no dict"),
        ({"plan": {"policies": [float("inf")]}}, "'plan' holds a number that is not finite"),
        ({"same_ranks": ["1"]}, "'same_ranks' holds no tuple"),
        ({"capture": {"exit_status": "9"}}, "'exit_status' holds no int"),
        ({"created_us": "now"}, "'created_us' holds no float"),
    ],
)
def test_values_of_another_type_are_refused(record: dict[str, object], sentence: str) -> None:
    """A value of the wrong type is named."""
    with pytest.raises(TypeError, match=sentence):
        Manifest.from_json(record)


def test_ranks_that_differ_stay() -> None:
    """Ranks 2 and 5 of a larger job keep their numbers and say nothing."""
    manifests = [Manifest(rank=5), Manifest(rank=2)]
    assert number_ranks(manifests) == manifests


def test_equal_ranks_are_numbered_in_order() -> None:
    """Two processes that are both rank 0 become 0 and 1, and the second one's notes say so."""
    first, second = number_ranks([Manifest(pid=10), Manifest(pid=20)])
    assert (first.rank, second.rank) == (0, 1)
    assert first.notes == ()
    assert second.notes == ("Several processes were recorded as rank 0; process 20 is 1 here.",)


PAGE = Path(__file__).parents[2] / "docs" / "trace-format.md"


def test_format_reference_is_up_to_date() -> None:
    """docs/trace-format.md is what `python -m memprof.trace.schema` prints."""
    assert PAGE.read_text(encoding="utf-8") == reference()


def file_of(folder: Path, *phases: str) -> Path:
    path = folder / "run.memprof"
    write_trace(path, [(Manifest(), make_tables([[Op(phase=phase) for phase in phases]], [Storage("w", 4)]))])
    return path


def test_all_that_there_can_be(tmp_path: Path) -> None:
    phases = [*PHASES, *(f"phase {number}" for number in range(MOST_NAMES))]
    assert Trace.open(file_of(tmp_path, *phases)).table(Ops).phase.tolist() == phases


@pytest.mark.parametrize("phase", ["<b>", "x" * 65, "a\nb", "peak", "again", " ", "rollout "])
def test_no_name_of_a_phase(tmp_path: Path, phase: str) -> None:
    """What could be taken for something else, or for markup, is damage."""
    with pytest.raises(BadInputError, match="table ops, row 1: unknown phase"):
        Trace.open(file_of(tmp_path, "forward", phase)).table(Ops)


def test_phases_may_not_be_missing(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="table ops, row 1: phase is missing"):
        Trace.open(file_of(tmp_path, "forward", "")).table(Ops)


def test_more_names_than_readers_hold(tmp_path: Path) -> None:
    phases = [f"phase {number}" for number in range(MOST_NAMES + 1)]
    with pytest.raises(BadInputError, match="table ops: phase has 65 names of the job's own"):
        Trace.open(file_of(tmp_path, *phases)).table(Ops)


FOLDER = Path(__file__).parent / "golden"


GOLDEN_FILES = sorted(FOLDER.glob("*.memprof"))


def test_every_schema_version_has_its_file() -> None:
    """A new schema version comes with a golden file, and none is ever removed."""
    assert [path.name for path in GOLDEN_FILES] == [
        f"schema-{version + 1}.memprof" for version in range(SCHEMA_VERSION)
    ]


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.stem)
def test_golden_file_opens(path: Path) -> None:
    """The file opens with both ranks and gives the figures worked out when it was made."""
    trace = Trace.open(path)
    assert trace.ranks == (0, 1)
    assert trace.rank_trace(1).manifest.pid == 8
    assert trace.manifest.capture.ends_at == "step 4, forward"
    assert trace.recorded_steps == (1, 2)
    step = trace.steady_step()
    step.check()
    assert (step.number, step.duration_us) == (2, 250.0)
    # weight 4096 + batch 1024, then output 1088 and workspace 128; gradient 4096 beside output; gradient alone
    assert live_bytes(step).during.tolist() == [6336, 10304, 9216]
    assert step.saved.released_op_id.tolist() == [1]
    assert step.modules.name.tolist() == ["", "layer"]
    assert step.stacks.frames[step.ops.stack_id[0]] == "train.py:12:main\ntrain.py:20:<module>"
    assert trace.table(HostMemory).private_bytes.tolist() == [8_000, -1]
    assert trace.table(Segments).is_expandable.tolist() == [True]


def test_golden_file_of_this_version_holds_every_column() -> None:
    """The newest golden file is what its script writes: remake it when a column changes before the release."""
    trace = Trace.open(FOLDER / f"schema-{SCHEMA_VERSION}.memprof")
    tables = golden_tables()
    assert trace.manifest == golden_manifest(0)
    for kind in TABLES:
        assert_tables_equal(tables[kind], trace.table(kind))
