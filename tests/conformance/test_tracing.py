"""A job's own modes, kinds of tensors, traces and higher-order operators are as without memprof."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from memprof.replay.live import live_bytes
from memprof.trace.schema import Ops, Steps
from memprof.trace.store import Trace
from tests.conformance import running
from tests.conformance.running import MODES, Job, run_both, with_plain_run
from tests.truth import measure

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


@with_plain_run("modes")
@pytest.mark.parametrize(
    "way", [pytest.param("record", marks=pytest.mark.slow), pytest.param("light", marks=pytest.mark.slow), "all"]
)
def test_modes_see_the_same_calls(way: str, tmp_path: Path) -> None:
    """Each call of torch's functions and operators is listed, and the lists are equal."""
    options = MODES.get(way, ("--skip", "3", "--steps", "9"))
    without, under = run_both(tmp_path, Job(("counts_calls.py",)), options)
    assert without.returncode == 0, without.stderr.decode()
    assert under.stderr.decode() == without.stderr.decode()
    assert under.stdout.decode() == without.stdout.decode()
    assert under.returncode == 0


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


_RECORD = (sys.executable, "-P", "-m", "memprof.cli.main", "record", "-q", "-o", "run.memprof")


_HIGHER_ORDER_MODES = {
    "record": running.WINDOW,
    "light": ("--light",),
    "remat": ("--remat", "1GiB", *running.WINDOW),
    "remat, unrecorded": ("--remat", "1GiB", "--skip", "4", "--steps", "1"),
}


#: Parts of tests/conformance/scripts/higher_order.py, by what they have in common.
_QUICK = ("cond", "while_loop", "random_state", "functionalized", "opaque", "prints")


_GROUPS = {
    "quick": _QUICK,
    "control": ("cond_of_cond", "while_loop", "scan", "associative_scan", "over_rows", "subgraph", "out_dtype"),
    "attention": ("flex_attention", "compiled_checkpoint", "compiled_cond"),
    "inductor": ("inductor_checkpoint",),
}


def _cases() -> list[object]:
    cases = []
    for group in _GROUPS:
        for mode in _HIGHER_ORDER_MODES:
            is_quick = group == "quick" and mode in ("record", "remat")
            marks = [running.with_plain_run(group), *([] if is_quick else [pytest.mark.slow])]
            cases.append(pytest.param(group, mode, id=f"{group}-{mode}", marks=marks))
    return cases


@pytest.mark.parametrize(("group", "mode"), _cases())
def test_a_job_with_higher_order_operators_is_left_alone(group: str, mode: str, tmp_path: Path) -> None:
    """Status, stdout (losses to the bit), stderr and files are those of the plain run, in every mode."""
    without, under = running.run_both(
        tmp_path, running.Job(("higher_order.py", *_GROUPS[group])), _HIGHER_ORDER_MODES[mode]
    )
    assert without.returncode == 0, without.stderr.decode()
    assert under.stderr.decode() == without.stderr.decode()
    assert under.stdout.decode() == without.stdout.decode()
    assert under == without
    if mode == "record":
        _check_what_is_named(tmp_path / "run.memprof", _GROUPS[group])


def _check_what_is_named(recording: Path, parts: tuple[str, ...]) -> None:
    """What could not be followed is one operator, and named in the notes; nothing else is."""
    trace = Trace.open(recording)
    named = [note for note in trace.manifest.notes if "higher-order operator" in note]
    operators = set(trace.table(Ops).name.tolist())
    if "opaque" in parts:
        assert len(named) == 1
        assert named[0].startswith("opaque_of_the_job: ")
        assert "opaque_of_the_job" in operators
    else:
        assert named == []
    assert operators.isdisjoint({"cond", "while_loop", "scan", "map_impl", "run_and_save_rng_state", "print"})


@pytest.mark.slow
@pytest.mark.parametrize("part", ["fails_followed", "fails_opaque"])
@pytest.mark.parametrize("mode", ["record", "light", "remat"])
def test_an_error_inside_one_is_the_job_s_own(part: str, mode: str, tmp_path: Path) -> None:
    """An error raised inside a branch has the traceback that it has without memprof, frame for frame."""
    without, under = running.run_both(tmp_path, running.Job(("higher_order.py", part)), _HIGHER_ORDER_MODES[mode])
    assert without.returncode == 1
    assert b"the job's own error" in without.stderr
    assert under.stderr.decode() == without.stderr.decode()
    assert under == without


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(_QUICK, id="quick"),
        *(pytest.param(_GROUPS[name], id=name, marks=pytest.mark.slow) for name in ("control", "attention")),
    ],
)
def test_a_dry_run_takes_them(parts: tuple[str, ...], tmp_path: Path) -> None:
    """A dry run goes through higher-order operators to its end, and records complete steps."""
    output = tmp_path / "run.memprof"
    words = [*_RECORD[:-1], str(output), "--dry-run", *running.WINDOW, "higher_order.py", *parts]
    done = subprocess.run(words, cwd=running.SCRIPTS, capture_output=True, text=True, timeout=300, check=False)
    if "opaque" in parts:
        # Nothing gives the shapes that it returns: it is refused in one sentence that names it.
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        assert "opaque_of_the_job cannot be dry-run: it is a higher-order operator" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    steps = Trace.open(output).table(Steps)
    assert steps.is_complete.all()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["cond", "while_loop", "scan", "over_rows", "functionalized", "opaque"])
def test_their_bytes_are_exact(part: str, tmp_path: Path) -> None:
    """The recorded peak of each step is the allocator's own, to the byte, with operators inside a higher-order one.

    Tracing a function leaves tensors in reference cycles, and when Python collects them depends on how many objects
    any thread has made since: a step's peak differs by 576 bytes with it, also without memprof. So nothing is
    collected.
    """
    arguments = ["--no-collection", part]
    output = tmp_path / "run.memprof"
    script = running.SCRIPTS / "higher_order.py"
    words = [*_RECORD[:-1], str(output), "--skip", "2", "--steps", "2", str(script), *arguments]
    subprocess.run(words, check=True, timeout=300)
    truth = measure(script, arguments)
    steps = Trace.open(output).table(Steps)
    for number, kind in zip(steps.step.tolist(), steps.kind.tolist(), strict=True):
        if kind == "recorded":
            peak = int(live_bytes(Trace.open(output).step(number)).during.max())
            assert peak == truth.updates[number].peak_bytes
