"""A job that uses torch's profiler itself has it as without memprof, whenever it warms up, runs and ends."""

from __future__ import annotations

import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.running import MODES, Job, run_both, with_plain_run

#: Every wait and every warm-up up to 3, with the number of active steps and of repetitions changing.
SCHEDULES = [
    f"scheduled {wait} {warmup} {1 + (wait + warmup) % 3} {(wait + warmup // 2) % 2}"
    for wait, warmup in product(range(4), range(4))
]
OTHERS = [
    "scheduled 1 1 2 0 profile_memory",
    "scheduled 0 2 1 0 with_stack record_shapes",
    "scheduled 1 2 1 2 profile_memory with_stack record_shapes with_flops with_modules",
    "late 0 1",
    "late 1 2",
    "whole",
    "to_files",
    "autograd",
    "marks",
    "low_level",
    "observed",
    "two_in_turn",
    "in_thread",
    "in_backward",
    "in_forward",
    "fails warmup",
    "fails active",
    "never_ended warmup",
    "never_ended active",
    "forgotten",
]
#: Of each way, what `make test` runs.
_QUICK = {("scheduled 1 1 3 1", "record"), ("in_thread", "record"), ("in_backward", "light")}


def _cases() -> list[Any]:
    pairs = [
        *product(OTHERS, ("record", "light", "remat")),
        *product(SCHEDULES, ("record", "light")),
    ]
    return [
        pytest.param(
            words,
            way,
            id=f"{words} {way}",
            marks=[with_plain_run(words), *([] if (words, way) in _QUICK else [pytest.mark.slow])],
        )
        for words, way in pairs
    ]


@pytest.mark.parametrize(("words", "way"), _cases())
def test_profiles_as_without_memprof(words: str, way: str, tmp_path: Path) -> None:
    """Losses, operators and counts in the job's profiles, stderr and status are those of the plain run.

    Under remat all but the profiles: the plan runs the job's operators, and those are in a profile, too.

    A session that is never ended may make a plain Python end with a segmentation fault in torch's C++ destructors.
    """
    without, under = run_both(tmp_path, Job(("profiles_itself.py", *words.split())), MODES[way])
    if words == "never_ended active":
        assert {without.returncode, under.returncode} <= {0, -signal.SIGSEGV}
        assert under.stdout.decode() == without.stdout.decode()
        assert under.files == without.files
        return
    assert without.returncode == 0, without.stderr.decode()
    # Said of frees whose size torch does not know; under memprof it does (docs/record.md).
    unknown = [line for line in without.stderr.splitlines(keepends=True) if b"Memory block of unknown size" in line]
    assert (
        under.stderr.decode()
        == b"".join(line for line in without.stderr.splitlines(keepends=True) if line not in unknown).decode()
    )
    assert _printed(under.stdout, way) == _printed(without.stdout, way)
    assert under.files == without.files
    assert under.returncode == 0


def _printed(stdout: bytes, way: str) -> str:
    lines = stdout.decode().splitlines()
    return "\n".join("a profile" if way == "remat" and "aten::" in line else line for line in lines)
