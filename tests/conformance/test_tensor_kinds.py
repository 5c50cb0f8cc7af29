"""Tensors of every kind behave in a recorded job as they do without memprof."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.trace.store import Trace
from tests.conformance import running

_MODES = {"record": running.WINDOW, "light": ("--light",), "remat": ("--remat", "1GiB", *running.WINDOW)}


@running.with_plain_run("tensor kinds")
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "record" else [pytest.mark.slow]) for mode in _MODES]
)
def test_tensors_of_every_kind_are_left_alone(mode: str, tmp_path: Path) -> None:
    """Values, gradients, losses, stderr and status are those of the plain run, and the recording is whole."""
    without, under = running.run_both(tmp_path, running.Job(("tensor_kinds.py",)), _MODES[mode])
    assert without.returncode == 0, without.stderr.decode()
    assert under.stderr.decode() == without.stderr.decode()
    hide = b"['" if mode == "remat" else b"\n"  # what a subclass sees includes what autograd keeps through hooks
    lines = [
        [line for line in outcome.stdout.splitlines() if not line.startswith(hide)] for outcome in (without, under)
    ]
    assert lines[1] == lines[0]
    assert under.returncode == 0
    assert Trace.open(tmp_path / "run.memprof").manifest.capture.is_complete
