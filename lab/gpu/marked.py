"""Runs the tests that are marked gpu."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter

from lab.gpu.running import ROOT, environment
from lab.gpu.section import Found, Place

TITLE = "Tests marked gpu"
HOW = "`pytest -m gpu` over the files that hold such tests."
COLUMNS = ("file", "passed", "failed", "skipped")
_MARK = re.compile(r"mark\.gpu\b")


def marked_files() -> list[str]:
    """Returns the test files with tests marked gpu: others may need packages not installed on the GPU machine."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if _MARK.search(path.read_text(encoding="utf-8"))]


def measure(place: Place, found: Found) -> None:
    """Runs them, and counts."""
    files = marked_files()
    if not files:
        raise RuntimeError("no test is marked gpu")
    log = place.folder("work") / "pytest.xml"
    log.unlink(missing_ok=True)
    # Not the plugins of pyproject.toml: the machine may lack them.
    options = "addopts=--disable-plugin-autoload -p timeout --import-mode=importlib --strict-markers -ra"
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", "-o", options]
    said = place.folder("work") / "pytest.txt"  # where tests that were not done in time can be read off
    with said.open("wb") as file:
        done = subprocess.run(
            [*command, "--durations=10", f"--junitxml={log}", *files],
            cwd=ROOT,
            env=environment(PYTHONUNBUFFERED="1"),
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=max(place.end - time.monotonic(), 1),
        )
    if not log.exists():
        lines = said.read_text(errors="replace").strip().splitlines()
        raise RuntimeError(f"pytest ended with {done.returncode}: {' | '.join(lines[-3:])}")
    counts: dict[str, Counter[str]] = {}
    for case in ET.parse(log).getroot().iter("testcase"):
        failure = next((part for part in case if part.tag in ("failure", "error")), None)
        is_skipped = any(part.tag == "skipped" for part in case)
        name = str(case.get("classname") or case.get("name"))
        counts.setdefault(name, Counter())[
            "failed" if failure is not None else "skipped" if is_skipped else "passed"
        ] += 1
        if failure is not None:
            found.lost(f"{name}.{case.get('name')}", RuntimeError(str(failure.get("message"))[:500]))
    for name, count in counts.items():
        found.add((name, *(str(count[key]) for key in COLUMNS[1:])), file=name, **count)
    total = sum(counts.values(), Counter())
    text = f"all pass: {total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped"
    # Without a GPU they are skipped, each with its reason.
    found.bar(text, not total["failed"] and (place.is_rehearsal or total["passed"] > 0))
