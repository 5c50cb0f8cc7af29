"""Odd but legal jobs behave under every mode of ``memprof record`` as they do without it."""

from __future__ import annotations

import contextlib
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from memprof.launch.outcome.plan_marks import REFUSED_STATUS
from tests.conformance.odd.interpreters import INTERPRETERS
from tests.conformance.odd.jobs import OddJob, names_of
from tests.conformance.odd.processes import PROCESSES
from tests.conformance.odd.surroundings import SURROUNDINGS
from tests.conformance.odd.training import TRAINING
from tests.conformance.running import MODES, Outcome, start_plain, start_under
from tests.warm import client

#: They look at how an interpreter starts, ends and finds things.
pytestmark = pytest.mark.cold

_SENTENCE = re.compile(rb"^memprof: the plan was not applied: [^\n]*\n", re.MULTILINE)
JOBS = [*PROCESSES, *INTERPRETERS, *SURROUNDINGS, *TRAINING]
#: What `make test` runs, and in which modes: one of each kind, most of them without torch. `make test-all` runs every
#: job in every mode.
QUICK: dict[str, tuple[str, ...]] = {
    "signals timer": ("record",),
    "signals waits": ("record",),
    "signals wakes_up": ("record",),
    "signals inherited": ("record",),
    "signals own_group": ("record",),
    "exits exits_with_subclass": ("record",),
    "exits leaves_in_thread": ("record",),
    "exits at_exit": ("record",),
    "exits trains_at_exit": ("remat",),
    "exits finalizers": ("record",),
    "exits except_hook_exits": ("record",),
    "children daemonises": ("record",),
    "children execs_itself": ("record", "dry-run"),
    "children empty_environment": ("record",),
    "children own_descriptors": ("record",),
    "children forkserver": ("record",),
    "python -I": ("record", "remat"),
    "python -X with values": ("record",),
    "a program on standard input": ("record",),
    "compiled files elsewhere": ("record",),
    "zipped programs": ("record",),
    "a package and its parts": ("record",),
    "a name with a newline": ("record",),
    "all streams closed": ("record",),
    "a pipe that nobody reads": ("record",),
    "a terminal": ("record",),
    "sitecustomize that ends Python": ("record", "light"),
    "no environment": ("record",),
    "surroundings closes_descriptors": ("record", "light"),
}
#: Plans that preserve every number, and plans that round or change how a batch is cut.
EXACT = (
    ("--checkpoint", "*"),
    ("--swap", "*:disk"),
    ("--swap", "optimizer:disk"),
    ("--swap", "optimizer,one-by-one:disk"),
    ("--swap", "parameters:disk"),
    ("--remat", "1GiB"),
)
ROUNDING = (
    ("--precision", "bf16"),
    ("--accumulate", "2"),
    ("--optimizer", "loop"),
    ("--optimizer", "in-backward"),
    ("--optimizer", "fused"),
    ("--compress", "*"),
    ("--loss", "2"),
    ("--precision", "pure-bf16"),
)
#: Whole processes that train, each run under the plan at its place; the policies return in turn.
PLANNED = (
    "a folder that may not be written",
    "sitecustomize that imports torch",
    "no temporary folder",
    "umask",
    "compiled files nowhere",
    "python -O",
    "exits trains_at_exit",
    "exits trains_after_main",
    "signals timer_in_steps",
    "children trains_in_fork",
    "children trains_in_pool",
    "surroundings drops_rights",
    "looking warning_errors",
    "surroundings few_descriptors",
    "exits thread_outlives_main",
    "python -W error trains",
)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, id=f"{name}-{' '.join(plan)}", marks=[pytest.mark.slow] if number else [])
        for number, (name, plan) in enumerate(zip(PLANNED, itertools.cycle(EXACT + ROUNDING)))
    ],
)
def test_is_as_without_memprof_under_a_plan(name: str, plan: tuple[str, str], tmp_path: Path) -> None:
    """Status is that of the plain run, and what it prints where the plan keeps numbers; or it is refused in words."""
    odd = next(job for job in JOBS if job.name == name)
    # How an interpreter starts is nothing to the first.
    with client.enabled() if name == PLANNED[0] else contextlib.nullcontext():
        plain = start_plain(tmp_path / "plain" / "job", odd.job)
        options = (*odd.options("record"), *plan)
        under = start_under(tmp_path / "job", odd.job, tmp_path / "run.memprof", options)
    under = _without_sentence(under.finish(odd.status))
    expected = plain.finish()
    if under.returncode == REFUSED_STATUS:
        assert under.stderr.startswith(b"memprof: ")
        return
    assert under.returncode == expected.returncode == odd.status, _text(under.stderr)
    assert plan in ROUNDING or under.stdout == expected.stdout


@pytest.mark.parametrize(
    ("odd", "mode"),
    [pytest.param(job, mode, id=f"{job.name}-{mode}") for job in JOBS for mode in QUICK.get(job.name, ())],
)
def test_is_as_without_memprof(odd: OddJob, mode: str, tmp_path: Path) -> None:
    """Exit status or signal, stdout, stderr and files are those of the plain run; a dry run ends in order."""
    plain = start_plain(tmp_path / "plain" / "job", odd.job)
    under = start_under(tmp_path / mode / "job", odd.job, tmp_path / "run.memprof", odd.options(mode))
    assert differences(odd, mode, plain.finish(), under.finish(odd.status)) == []


@pytest.mark.slow
@pytest.mark.parametrize("odd", [pytest.param(job, id=job.name) for job in JOBS])
def test_is_as_without_memprof_in_every_mode(odd: OddJob, tmp_path: Path) -> None:
    """One plain run is compared with each mode."""
    plain = start_plain(tmp_path / "plain" / "job", odd.job).finish()
    found: dict[str, list[str]] = {}
    for mode in MODES:
        recording = tmp_path / f"{mode}.memprof"
        under = start_under(tmp_path / mode / "job", odd.job, recording, odd.options(mode)).finish(odd.status)
        found[mode] = differences(odd, mode, plain, under)
    assert found == {mode: [] for mode in MODES}


def test_covers_a_hundred_jobs() -> None:
    """There are at least a hundred of them, each named once, and those that `make test` runs are among them."""
    names = names_of(JOBS)
    assert len(names) == len(set(names)) >= 100
    assert set(QUICK) <= {job.name for job in JOBS}


def differences(odd: OddJob, mode: str, plain: Outcome, under: Outcome) -> list[str]:
    """Lists the differences from the plain run, each in a line or two.

    A dry run computes nothing, so only its end is compared: where the plain run passes, it passes too, or is refused
    with a message. A plan runs operators of its own, which a job that counts operators observes.
    """
    assert plain.returncode == odd.status, _text(plain.stderr)
    if mode == "dry-run":
        is_said = under.stderr.startswith(b"memprof: ") or odd.job.shell.endswith("2>/dev/null")
        is_refused = under.returncode == REFUSED_STATUS and is_said
        is_in_order = under.returncode == (0 if odd.is_killed_late else odd.status)
        is_fine = is_refused or is_in_order or odd.status > 0
        return [] if is_fine else [f"status: {plain.returncode}, but {under.returncode}: {_text(under.stderr)}"]
    if mode == "remat":
        under = _without_sentence(under)
    sees_plan = mode == "remat" and odd.counts_operators
    pairs: tuple[tuple[str, Any, Any], ...] = (
        ("status", plain.returncode, under.returncode),
        ("stdout", plain.stdout, plain.stdout if sees_plan else under.stdout),
        ("stderr", plain.stderr, under.stderr),
        *((f"file {name}", plain.files.get(name), under.files.get(name)) for name in plain.files | under.files),
    )
    return [f"{what}: {expected!r}, but {found!r}" for what, expected, found in pairs if expected != found]


def _text(printed: bytes) -> str:
    return printed.decode(errors="replace")


def _without_sentence(outcome: Outcome) -> Outcome:
    """Removes the message that the plan applies to no model, which memprof prints even with --quiet.

    It is printed on stderr, which may be a terminal or a file shared with stdout.
    """
    files = {name: _SENTENCE.sub(b"", content) for name, content in outcome.files.items()}
    texts = (_SENTENCE.sub(b"", text) for text in (outcome.stdout, outcome.stderr))
    return Outcome(outcome.returncode, *texts, files)
