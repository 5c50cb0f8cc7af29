"""Which tests run which lines, and how long each takes: measured once, and again where a file has changed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).parents[2]
#: What is mutated; the recorder is not, most of whose code runs in other processes.
SOURCES = tuple(f"memprof/{name}" for name in ("planners", "policies", "replay", "trace", "analysis"))
#: Tests that run it in their own process. Those of tests/policies/matrix take minutes, for what the others hold too.
TESTS = (
    "planners",
    "replay",
    "trace",
    "analysis",
    "cli",
    "emit",
    "policies",
    "recorder",
    "test_phases.py",
    "test_sample_traces.py",
)
SKIPPED = ("tests/policies/matrix", "tests/policies/apart", "tests/cli/test_fit.py")


#: Test files that one process runs: a run that is stopped keeps what was written after each.
_AT_ONCE = 10


@dataclass
class FileLines:
    """What one test file runs.

    Attributes:
        digest: Of the test file.
        seconds: Time of each passed test, by its node id.
        lines: Of each source file, the tests that run a line; ``""`` stands for what any test of the file sets up.
        digests: Of the source files, when they were run.
    """

    digest: str
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


def digest_of(path: Path) -> str:
    """Returns the first 16 hexadecimal digits of a file's SHA-256; of a file that is missing, nothing."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


class LineRecorder:
    """A pytest plugin that measures coverage per test."""

    def __init__(self) -> None:
        """Begins to measure."""
        self._coverage = coverage.Coverage(
            data_file=None, source=[str(ROOT / path) for path in SOURCES], config_file=False, messages=False
        )
        self._coverage.start()
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Notes what is set up for the file's tests: a later one may find it made."""
        self._coverage.switch_context(item.nodeid.partition("::")[0])
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Notes what the test itself runs."""
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds up the time of a test; one that does not pass is not used."""
        self.seconds[report.nodeid] += report.duration
        if report.outcome != "passed":
            self.failed.add(report.nodeid)

    def results(self) -> dict[str, FileLines]:
        """Returns what each test file runs."""
        self._coverage.stop()
        data = self._coverage.get_data()
        found: dict[str, FileLines] = {}
        for test, seconds in self.seconds.items():
            if test not in self.failed:
                file = test.partition("::")[0]
                one = found.setdefault(file, FileLines(digest_of(ROOT / file)))
                one.seconds[test] = round(seconds, 3)
        for path in data.measured_files():
            source = str(Path(path).relative_to(ROOT))
            for line, contexts in data.contexts_by_lineno(path).items():
                for context in contexts:
                    file, _, name = context.partition("::")
                    if file in found and (not name or context in found[file].seconds):
                        found[file].lines.setdefault(source, {}).setdefault(line, []).append(context if name else "")
        for one in found.values():
            one.digests = {source: digest_of(ROOT / source) for source in one.lines}
        return found


class LineMap:
    """The tests of every line, from a file that is brought up to date."""

    def __init__(self, path: Path) -> None:
        """Reads the file, if there is one."""
        self.path = path
        read = json.loads(path.read_text()) if path.exists() else {}
        self.files = {
            name: FileLines(
                one["digest"],
                one["seconds"],
                {source: {int(k): v for k, v in lines.items()} for source, lines in one["lines"].items()},
                one["digests"],
            )
            for name, one in read.items()
        }

    def update(self) -> None:
        """Runs the test files that are new, have changed, or run source that has changed."""
        stale = [file for file in test_files() if self._is_stale(file)]
        for number in range(0, len(stale), _AT_ONCE):
            print(f"Measuring which lines tests run: {number} of {len(stale)} test files done", flush=True)
            command = [sys.executable, "-m", "lab.mutants.lines", str(self.path), *stale[number : number + _AT_ONCE]]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        if stale:
            self.files = LineMap(self.path).files

    def tests_of(self, source: str, lines: Iterable[int]) -> list[list[str]]:
        """Returns the tests of some lines, in the order in which to run them.

        The first list holds those that run a line, the second the others of the same files: lines of a
        module-wide fixture or a cache are attributed to the first test that needs it. The shortest come first.
        """
        covering: dict[str, float] = {}
        others: dict[str, float] = {}
        for one in self.files.values():
            at = one.lines.get(source, {})
            tests = {test for line in lines for test in at.get(line, ())}
            if tests:
                every = one.seconds if "" in tests else {test: one.seconds[test] for test in tests}
                covering |= every
                others |= {test: seconds for test, seconds in one.seconds.items() if test not in every}
        return [sorted(found, key=lambda test: found[test]) for found in (covering, others)]

    def seconds_of(self, test: str) -> float:
        """Returns how long a test took when it was measured."""
        return self.files[test.partition("::")[0]].seconds[test]

    def _is_stale(self, file: str) -> bool:
        known = self.files.get(file)
        if known is None or known.digest != digest_of(ROOT / file):
            return True
        return any(digest != digest_of(ROOT / source) for source, digest in known.digests.items())


def test_files() -> list[str]:
    """Returns the paths of the test files that run the source in their own process."""
    found = []
    for name in TESTS:
        place = ROOT / "tests" / name
        found += [place] if place.is_file() else sorted(place.rglob("test_*.py"))
    names = [str(path.relative_to(ROOT)) for path in found]
    return [name for name in names if not name.startswith(SKIPPED)]


def main(path: Path, files: list[str]) -> None:
    """Runs test files, and adds what they run to the map."""
    recorder = LineRecorder()
    pytest.main(["-q", "--no-header", "-p", "no:cacheprovider", "--hypothesis-seed=0", *files], plugins=[recorder])
    results = recorder.results()
    known = json.loads(path.read_text()) if path.exists() else {}
    for file in files:
        known[file] = vars(results.get(file, FileLines(digest_of(ROOT / file))))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
