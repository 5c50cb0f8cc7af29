"""Phases in files: the recorder's own, those that a job names, and what is neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.errors import BadInputError
from memprof.phases import MOST_NAMES, PHASES
from memprof.trace.manifest import Manifest
from memprof.trace.schema import Ops
from memprof.trace.store import Trace, write_trace
from tests.building import Op, Storage, make_tables


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
