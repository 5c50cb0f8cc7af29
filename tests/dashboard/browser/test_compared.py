"""`memprof diff --dashboard`: the page in a browser, with names that are markup."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from memprof_dashboard.sources import Workspace, open_sources
from tests.analysis.test_compared_allocations import _KIB, _STEP, snapshot
from tests.dashboard.browser.conftest import Served, Shown

_HOSTILE = "<img src=x onerror=alert(1)>"


def test_both_sides_are_shown_until_it_is_interrupted(show: Callable[..., Shown], tmp_path: Path) -> None:
    """The result in the terminal and on the page, hover and zoom; the timeline is back on other pages; exit code 4."""
    real = snapshot(tmp_path / "gpu.pickle", [*_STEP, ("mm", 4 * _KIB)], file=_HOSTILE)
    dry = snapshot(tmp_path / "dry.pickle", [("mm", 60 * _KIB), *_STEP[1:]])
    command = [sys.executable, "-m", "memprof", "diff", "--dashboard", real, dry]
    environment = os.environ | {"BROWSER": "true"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        said = ""
        while "Ctrl-C" not in said:
            line = process.stderr.readline()
            assert line, f"ended with {process.wait()}: {said}"
            said += line
        origin, token, search = re.findall(r"(http://\S+)/\?token=([^&\s]+)&(\S+)", said)[0]
        assert search == "tab=allocations&other=1"
        shown = show(Served(origin, token, Workspace(open_sources([Path(real), Path(dry)]))), search, is_drawn=False)
        page = shown.page
        shown.wait_text(".verdict", "3 of 5 allocations equal, peak \N{MINUS SIGN}4.167 %")
        page.wait_for_selector("#allocations-graph .main-svg .scatterlayer .trace", state="attached")
        shown.wait_idle()
        assert page.locator("#timeline").is_hidden()
        box = page.locator("#allocations-graph .nsewdrag.drag").first.bounding_box()
        page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + box["height"] / 2)
        page.wait_for_function("() => document.querySelector('#allocations-graph .hoverlayer')?.textContent.length > 0")
        assert "<img src=x" in page.text_content("#allocations-graph .hoverlayer")
        assert page.locator("img[src=x]").count() == 0
        assert _HOSTILE in page.text_content("#panel .table")
        shown.open_tab("blocks", "Lifetimes")
        page.wait_for_selector("#timeline", state="visible")
        page.goto("about:blank")
        process.send_signal(signal.SIGINT)
        assert "3 of 5 allocations equal" in process.stdout.read()
    assert process.returncode == 4
