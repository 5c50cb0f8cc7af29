"""Tests one mutant: a process that has torch imported already runs the tests in a fork, over a copy of the tree."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab.mutants.lines import ROOT

#: What a mutant may take of memory: it may ask for any size.
_MOST_BYTES = 12 << 30
#: Exit status of a fork that did not come as far as pytest.
_NOT_STARTED = 70
_LEFT_OUT = (".git", ".venv", "build", "dist", "__pycache__", ".hypothesis", ".*_cache", "shared", "docs")


@dataclass(frozen=True)
class Verdict:
    """The result of a mutant.

    Attributes:
        outcome: "killed", "timed out", "survived", or "not run" where no test runs the line.
        tests: How many tests were selected.
        killer: The first test that failed; empty without one.
        took_s: How long it took.
    """

    outcome: str
    tests: int = 0
    killer: str = ""
    took_s: float = 0.0


class Selection:
    """A pytest plugin that keeps some tests, in their order, and notes the first that fails."""

    def __init__(self, tests: list[str], failed: Path) -> None:
        """Takes node ids, and where to write the one that failed."""
        self._order = {test: place for place, test in enumerate(tests)}
        self._failed = failed

    def pytest_collection_modifyitems(self, items: list) -> None:  # type: ignore[type-arg]
        """Keeps the selected tests."""
        items[:] = sorted((i for i in items if i.nodeid in self._order), key=lambda i: self._order[i.nodeid])

    def pytest_runtest_logreport(self, report) -> None:  # type: ignore[no-untyped-def]
        """Notes a failure."""
        if report.failed and not self._failed.exists():
            self._failed.write_text(report.nodeid)


class Copy:
    """A copy of the tree, in which one file at a time is changed."""

    def __init__(self, place: Path) -> None:
        """Copies the tree."""
        self.place = place
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(ROOT, place, ignore=shutil.ignore_patterns(*_LEFT_OUT), symlinks=True)
        beside, link = ROOT.parent / "shared", place.parent / "shared"  # larger files that tests read where they are
        if beside.exists() and not link.exists():
            link.symlink_to(beside.resolve())
        # Newer than every compiled file, whose times have whole seconds.
        self._time = int(time.time())
        self._pid = 0
        self._begun = self._limit = 0.0
        self._changed: Path | None = None
        self._tests: list[str] = []

    def start(self, source: str, text: str, tests: list[str], *, limit_s: float) -> None:
        """Writes a changed file, and starts the tests in a fork."""
        self._changed = self.place / source
        self._write(text)
        shutil.rmtree(self.place / ".hypothesis", ignore_errors=True)
        self._failed.unlink(missing_ok=True)
        self._tests, self._begun, self._limit = tests, time.monotonic(), limit_s
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            self._run(tests)

    def verdict(self) -> Verdict | None:
        """Returns what came of it, once the tests have ended or their time is over; None before."""
        took = time.monotonic() - self._begun
        pid, status = os.waitpid(self._pid, os.WNOHANG)
        if not pid and took < self._limit:
            return None
        with contextlib.suppress(ProcessLookupError):  # the whole group may have exited
            os.killpg(self._pid, signal.SIGKILL)
        if not pid:
            os.waitpid(self._pid, 0)
        assert self._changed is not None
        self._write((ROOT / self._changed.relative_to(self.place)).read_text())
        killer = self._failed.read_text() if self._failed.exists() else ""
        if killer:
            return Verdict("killed", len(self._tests), killer, took)
        if not pid:
            return Verdict("timed out", len(self._tests), "", took)
        code = os.waitstatus_to_exitcode(status)
        if code == _NOT_STARTED:
            raise RuntimeError(f"the tests could not start: {self.place.with_suffix('.log').read_text()[-2000:]}")
        if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return Verdict("survived", len(self._tests), "", took)
        return Verdict("killed", len(self._tests), "collecting the tests" if code > 0 else "a crash", took)

    @property
    def _failed(self) -> Path:
        return self.place.with_suffix(".failed")

    def _write(self, text: str) -> None:
        assert self._changed is not None
        self._changed.write_text(text)
        self._time += 2
        os.utime(self._changed, (self._time, self._time))

    def _run(self, tests: list[str]) -> None:
        """Runs the tests, and ends the process."""
        code = _NOT_STARTED
        try:
            os.setsid()
            log = os.open(self.place.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
            os.chdir(self.place)
            paths = [str(self.place), str(self.place / "dashboard")]
            os.environ["PYTHONPATH"] = os.pathsep.join(paths)
            sys.path[:] = paths + [path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "dashboard"))]
            for name in [name for name in sys.modules if name.partition(".")[0] in ("lab", "memprof", "tests")]:
                del sys.modules[name]
            code = self._tested(tests)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _tested(self, tests: list[str]) -> int:
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        options = ["-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        return int(pytest.main([*options, *files], plugins=[Selection(tests, self._failed)]))


def warm_up() -> None:
    """Imports what most tests need, and nothing of what is mutated."""
    for name in ("hypothesis.extra.numpy", "pandas", "pyarrow.parquet", "pytest", "scipy.optimize", "scipy.sparse"):
        importlib.import_module(name)
    import torch

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], foreach=True)
    assert "memprof" not in sys.modules
