"""Traces of every schema version ever released still open."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.replay.live import live_bytes
from memprof.trace.schema import SCHEMA_VERSION, TABLES, HostMemory, Segments
from memprof.trace.store import Trace
from tests.building import assert_tables_equal
from tests.trace.golden.make_golden import golden_manifest, golden_tables

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
