"""Phases named by a job: valid names, and their scope."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import memprof
from memprof.phases import PHASES, follow, in_order, is_own_name, named_phase, unfollow


@pytest.mark.parametrize("name", ["rollout", "GAE 2.0", "a", "x" * 64, "-_.", "évaluation"[1:]])
def test_names_of_letters_digits_and_three_signs(name: str) -> None:
    with memprof.phase(name):
        assert named_phase() == name


UNFIT = ["", " ", " rollout", "rollout ", "x" * 65, "a/b", "a\nb", "rollout\n", "<b>", "é", 7, "Forward", "peak"]


@pytest.mark.parametrize("name", [*UNFIT, *PHASES])
def test_other_names_are_refused_in_one_sentence(name: object) -> None:
    """Among them are memprof's own, in whatever letters."""
    with pytest.raises(ValueError, match=r"invalid phase name .*at most 64 letters") as caught:
        memprof.phase(name)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_the_inner_name_counts_and_the_outer_comes_back() -> None:
    """An error ends the phase, too; one phase can be entered within itself."""
    outer = memprof.phase("outer")
    with outer:
        with contextlib.suppress(KeyError), memprof.phase("inner"):
            assert named_phase() == "inner"
            raise KeyError
        with outer:
            assert named_phase() == "outer"
        assert named_phase() == "outer"
    assert named_phase() == ""


def test_names_are_a_threads_own() -> None:
    seen = []
    with memprof.phase("here"):
        thread = threading.Thread(target=lambda: seen.append(named_phase()))
        thread.start()
        thread.join()
    assert seen == [""]


def test_names_are_a_tasks_own() -> None:
    """Two tasks take turns in one thread, and each keeps its name."""
    seen = []

    @memprof.phase("first")
    async def first() -> str:
        """Says so."""
        await asyncio.sleep(0)
        seen.append(named_phase())
        return "done"

    async def second() -> None:
        with memprof.phase("second"):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            seen.append(named_phase())

    async def both() -> str:
        result, _ = await asyncio.gather(first(), second())
        return result

    with ThreadPoolExecutor(1) as thread:  # this thread may have an event loop that runs: the browser's
        assert thread.submit(lambda: asyncio.run(both())).result() == "done"
    assert seen == ["first", "second"]
    assert named_phase() == ""


def test_functions_are_decorated_and_generators_are_not() -> None:
    @memprof.phase("metrics")
    def metrics(value: int) -> tuple[str, int]:
        """Returns what it sees."""
        return named_phase(), value

    assert metrics(3) == ("metrics", 3)
    assert (metrics.__name__, metrics.__doc__) == ("metrics", "Returns what it sees.")

    def batches() -> Iterator[int]:
        yield 1

    for thing in (batches, int, None):
        with pytest.raises(TypeError, match="decorates functions only"):
            memprof.phase("metrics")(thing)  # type: ignore[arg-type]


def test_followers_hear_of_both_ends() -> None:
    heard: list[str] = []

    def hear() -> None:
        heard.append(named_phase())

    follow(hear)
    with memprof.phase("a"), memprof.phase("b"):
        pass
    unfollow(hear)
    unfollow(hear)
    with memprof.phase("c"):
        pass
    assert heard == ["a", "b", "a", ""]


def test_phases_are_listed_as_a_step_goes() -> None:
    names = ["other", "rollout", "", "loading", "optimizer", "evaluation", "backward", "forward", "GAE", "rollout"]
    listed = ["forward", "backward", "optimizer", "evaluation", "loading", "GAE", "rollout", "other"]
    assert in_order(names) == listed


def test_reserved_names_are_in_no_file() -> None:
    assert is_own_name("rollout")
    assert not any(map(is_own_name, ("peak", "again", "", "a/b")))


def test_it_needs_neither_torch_nor_numpy() -> None:
    program = (
        "import sys, memprof\n"
        "with memprof.phase('rollout'): pass\n"
        "sys.exit(bool({'torch', 'numpy', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
