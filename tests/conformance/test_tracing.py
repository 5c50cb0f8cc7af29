"""Jobs that trace, export or transform functions do so as without memprof, and get the same graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from memprof.trace.store import Trace
from tests.conformance import running

_MODES = {"record": running.WINDOW, "light": ("--light",), "remat": ("--remat", "1GiB", *running.WINDOW)}
_TRACED = ("jit_trace", "jit_trace_shape", "jit_trace_function", "jit_trace_train", "jit_trace_training_module")
_SCRIPTED = ("jit_script", "jit_trace_lstm", "jit_trace_transformer", "jit_trace_conv", "tensorboard_like_graph")
_FX = ("export", "fx", "make_fx_real", "make_fx_fake", "make_fx_functional", "own_fake_mode", "stateless")
_AUTOGRAD = ("forward_ad", "double_backward", "autograd_functional", "flop_counter", "jit_fork")
#: The last traces what autograd does, which remat's hooks are part of.
_TRANSFORMED = ("func_grad", "func_hessian", "func_vmap", "per_sample_grads", "jit_trace_grad_inside")
_ALL = (*_TRACED, *_SCRIPTED, *_FX, *_AUTOGRAD)


@running.with_plain_run("traces")
@pytest.mark.parametrize(
    ("mode", "programs"),
    [
        pytest.param("record", (*_ALL, *_TRANSFORMED), id="record"),
        pytest.param("light", (*_ALL, *_TRANSFORMED), id="light", marks=pytest.mark.slow),
        pytest.param("remat", (*_ALL, *_TRANSFORMED[:-1]), id="remat", marks=pytest.mark.slow),
    ],
)
def test_a_job_that_traces_is_left_alone(mode: str, programs: tuple[str, ...], tmp_path: Path) -> None:
    """Graphs, code, results, warnings and status are those of the plain run, and the recording is whole."""
    without, under = running.run_both(tmp_path, running.Job(("traces.py", *programs)), _MODES[mode])
    assert without.returncode == 0, without.stderr.decode()
    assert b"TracerWarning" not in under.stderr.replace(without.stderr, b"")
    assert under.stderr.decode() == without.stderr.decode()
    assert under.stdout.decode() == without.stdout.decode()
    assert under == without
    assert Trace.open(tmp_path / "run.memprof").manifest.capture.is_complete
