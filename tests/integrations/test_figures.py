"""Recordings as flat dicts, for experiment trackers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from memprof.errors import BadInputError
from memprof.integrations import summary
from memprof.replay.live import live_bytes
from memprof.trace.store import Trace

SAMPLES = sorted((Path(__file__).parents[2] / "sample_traces").glob("*/run.memprof"))


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.parent.name)
def test_figures_are_numbers_that_add_up(path: Path) -> None:
    """All values are finite floats under one prefix; the peak is the replay's, and its categories sum to it."""
    figures = summary(path)
    assert all(type(value) is float and math.isfinite(value) for value in figures.values())
    assert all(name.startswith("memprof/") for name in figures)
    peak = int(live_bytes(Trace.open(path).steady_step()).during.max())
    assert figures["memprof/peak_bytes"] == peak
    assert sum(value for name, value in figures.items() if name.startswith("memprof/peak/")) == peak
    assert max(value for name, value in figures.items() if name.startswith("memprof/phase/")) == peak
    json.dumps(figures, allow_nan=False)


def test_recording_may_be_open_already() -> None:
    """An open trace is taken as well as a file."""
    assert summary(Trace.open(SAMPLES[0])) == summary(SAMPLES[0])


def test_missing_recording_is_told(tmp_path: Path) -> None:
    """A file that is not there is bad input, in one sentence."""
    with pytest.raises(BadInputError):
        summary(tmp_path / "none.memprof")
