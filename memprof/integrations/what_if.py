"""A widget for notebooks: choose a budget, and see which plans would fit a recorded job into it."""

from __future__ import annotations

import html
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from memprof.errors import GateFailedError, UsageError
from memprof.units import format_bytes, format_us

#: Plans listed, and how long the search for them may take, in seconds.
_MOST_PLANS, _TIME_LIMIT_S = 6, 15


def what_if(path: str | os.PathLike[str]) -> Any:
    """Returns a widget with a slider for the budget, which lists the fastest plan of each kind within it.

    Raises:
        UsageError: ipywidgets is not installed.
    """
    try:
        import ipywidgets
    except ImportError:
        raise UsageError("the widget needs ipywidgets: pip install ipywidgets.") from None
    budget = ipywidgets.IntSlider(
        value=70, min=20, max=100, step=5, description="budget, %", continuous_update=False, readout_format="d"
    )
    search = ipywidgets.Button(description="Search plans", icon="search")
    answer = ipywidgets.HTML("Budget as a share of the recorded peak.")

    def run(_: object) -> None:
        search.disabled = True
        try:
            answer.value = find_plans(Path(path), budget.value)
        finally:
            search.disabled = False

    search.on_click(run)
    return ipywidgets.VBox([ipywidgets.HBox([budget, search]), answer])


def find_plans(path: Path, percent: int) -> str:
    """Searches in a separate process for plans that fit; returns them as a table in HTML, or why there are none.

    Args:
        path: The recording.
        percent: The budget, as a share of the recorded peak.
    """
    words = ["suggest", str(path), "--budget", f"{percent}%", "--time-limit", str(_TIME_LIMIT_S)]
    command = [sys.executable, "-m", "memprof", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, GateFailedError.exit_code):
        # A recording without a complete step is described on stdout, as JSON.
        reason = done.stderr.strip() or f"No plan can be predicted: see {shlex.join(['memprof', *words])}"
        return f"<pre>{html.escape(reason)}</pre>"
    found: dict[str, Any] = json.loads(done.stdout)
    fitting = [plan for plan in found["plans"] if plan["fits"]]
    if not fitting:
        return f"<p>{html.escape(found['reason'])}</p>"
    rows = "".join(_row(plan) for plan in fitting[:_MOST_PLANS])
    write = shlex.join(["memprof", *words[:4], "--write", "plan.toml"])
    return (
        f"<p>Within {format_bytes(found['budget_bytes'])}, the fastest plan of each kind first:</p>"
        "<table><tr><th>plan</th><th>predicted peak</th><th>step</th></tr>"
        f"{rows}</table><p>Write the first one: <code>{html.escape(write)}</code></p>"
    )


def _row(plan: dict[str, Any]) -> str:
    time = plan["step_time_us"]
    cells = (plan["describe"], format_bytes(plan["peak_allocated_bytes"]), "" if time is None else format_us(time))
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
