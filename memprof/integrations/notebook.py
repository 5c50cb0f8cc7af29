"""The notebook magic: `%load_ext memprof`, then `%%memprof` at the top of a cell that trains."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError as MagicUsageError
from IPython.core.magic_arguments import MagicArgumentParser
from IPython.display import IFrame, display

from memprof.errors import MemprofError, UsageError
from memprof.integrations.what_if import what_if
from memprof.launch.inline import InlineRecording, record
from memprof.launch.outcome.verdict import describe_recording

#: Default path of a cell's recording; the next cell overwrites it.
_DEFAULT_OUTPUT = "cell.memprof"


class CellMagic:
    """The cell magic ``%%memprof``.

    It runs a cell, records some of its training steps, and shows where its memory goes. Errors raised by the cell are
    shown as without the magic, and the steps recorded until then are reported.
    """

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._parser: Any = MagicArgumentParser("%%memprof", description="Record a cell that trains, and report on it.")
        add = self._parser.add_argument
        add("-o", "--output", default="", help=f"file to write; {_DEFAULT_OUTPUT}, replaced each time, if left out")
        add("-f", "--force", action="store_true", help="replace the file if it exists")
        add("--steps", type=int, default=3, help="steps to record (default: 3)")
        add("--skip", type=int, default=2, help="steps to skip first (default: 2)")
        add(
            "--report",
            choices=("timeline", "text", "html", "none"),
            default="timeline" if getattr(shell, "kernel", None) is not None else "text",
            help="show the timeline, the report as text, the report as a page with figures, or neither (default: "
            "timeline; text in a terminal)",
        )
        add("--what-if", action="store_true", help="show a widget that searches for plans within a budget")

    def __call__(self, line: str, cell: str) -> None:
        """Runs the magic."""
        arguments = self._parser.parse_argstring(line)
        path = Path(arguments.output or _DEFAULT_OUTPUT)
        gc.collect()  # models and optimizers replaced since: the recorder must not wait for their updates
        try:
            recording = record(
                path, steps=arguments.steps, skip=arguments.skip, force=arguments.force or not arguments.output
            )
            recording.__enter__()
        except (MemprofError, ValueError) as error:
            raise MagicUsageError(f"%%memprof: {error} The cell was not run.") from None
        failed: BaseException | None = None
        try:
            result = self._shell.run_cell(cell)
            failed = result.error_before_exec or result.error_in_exec
        finally:
            _end(recording, failed, arguments.report, shows_widget=arguments.what_if)


def register(shell: Any) -> None:
    """Registers the magic with a shell."""
    shell.register_magic_function(CellMagic(shell), "cell", "memprof")


def _end(recording: InlineRecording, failed: BaseException | None, report: str, *, shows_widget: bool) -> None:
    """Ends the recording of a cell, and shows the verdict, the next step and the requested report."""
    try:
        recording.__exit__(type(failed) if failed else None, failed, None)
    except MemprofError as error:
        print(f"memprof: {error}", file=sys.stderr)
        return
    if recording.packed is None:
        return
    print(describe_recording(recording.packed, "this cell"))
    if report == "timeline":
        command = [sys.executable, "-m", "memprof_dashboard.cell_output", str(recording.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr.rstrip(), file=sys.stderr)
        else:
            display(json.loads(done.stdout), raw=True)
    elif report == "text":
        print(_run("report", str(recording.path)))
    elif report == "html":
        page = recording.path.with_suffix(".html")
        print(_run("report", str(recording.path), "--html", str(page), "--force"))
        if page.is_file():
            display(IFrame(str(page), "100%", 800))
    if shows_widget:
        try:
            display(what_if(recording.path))
        except UsageError as error:
            print(f"memprof: {error}", file=sys.stderr)


def _run(*words: str) -> str:
    """Runs memprof in a separate process: its imports and memory stay out of the notebook."""
    done = subprocess.run([sys.executable, "-m", "memprof", *words], capture_output=True, text=True, check=False)
    return (done.stdout + (done.stderr if done.returncode else "")).rstrip()
