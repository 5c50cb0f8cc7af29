"""The command ``memprof dashboard``, also run by ``python -m memprof_dashboard``."""

from __future__ import annotations

import ctypes
import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from memprof.errors import MemprofError, UsageError
from memprof.harmless import notify

#: How often it is looked whether the recording of a running job has begun.
_POLL_S = 0.1


@click.command(
    epilog="""\b
Examples:
  memprof dashboard run.memprof
  memprof dashboard before.memprof after.memprof --port 9000 --no-browser
  memprof dashboard --attach 4711
  memprof dashboard gpu.pickle dry-run.pickle"""
)
@click.argument("traces", nargs=-1, type=click.Path(path_type=Path), metavar="TRACE...")
@click.option("--host", default="127.0.0.1", show_default=True, metavar="NAME", help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(min=0, max=65535),
    default=8050,
    show_default=True,
    metavar="N",
    help="Port to listen on; the next free one if it is taken. 0 picks any.",
)
@click.option("--prefix", default="/", metavar="PATH", help="Path below which it is served, behind a proxy.")
@click.option(
    "--editor",
    default="vscode",
    show_default=True,
    metavar="NAME",
    help="Editor that opens source lines: vscode, cursor, zed, pycharm, none; or an address with {file} and {line}.",
)
@click.option("--browser/--no-browser", default=True, show_default=True, help="Open the page in a browser.")
@click.option("--attach", "pid", type=click.IntRange(min=1), metavar="PID", help="Follow a job that is running.")
@click.option("--no-run", is_flag=True, help="Do not dry-run the job, even if you recorded it here.")
def dashboard(
    traces: tuple[Path, ...],
    host: str,
    port: int,
    prefix: str,
    editor: str,
    browser: bool,
    pid: int | None,
    no_run: bool,
) -> None:
    """Show recordings in a browser: memory over time, what allocated it, and which plans make the job fit.

    TRACE is a recording, a folder of ranks, or the spool folder of a job that is running or has crashed; also a memory
    snapshot or a profiler's trace, as memprof import reads. Several can be compared. Access needs the token in the
    printed address. What if dry-runs a job as memprof predict does: only in the folder where you recorded it.
    """
    require_dash()
    if not traces and pid is None:
        raise click.UsageError("Missing argument 'TRACE...'.")
    from memprof_dashboard.serve import serve  # dash takes seconds to import; the help needs none of it

    with _attached(pid) as running:
        serve(
            [*running, *traces],
            host=host,
            port=port,
            prefix=prefix,
            editor=editor,
            may_run=not no_run,
            opens_browser=browser,
            say=notify,
        )


def _end_with_parent() -> None:
    """Has this process interrupted when the one that started it ends, however it does: PR_SET_PDEATHSIG."""
    ctypes.CDLL(None).prctl(1, signal.SIGINT)


@contextmanager
def _attached(pid: int | None) -> Iterator[list[Path]]:
    """Has a process of its own record a running job until the dashboard ends; the recording is not kept.

    Raises:
        UsageError: It could not be attached to.
    """
    if pid is None:
        yield []
        return
    with tempfile.TemporaryDirectory(prefix="memprof-") as folder:
        output = Path(folder) / f"process-{pid}.memprof"
        command = [sys.executable, "-m", "memprof", "attach", str(pid), "-o", str(output), "--light"]
        ends_with_us = _end_with_parent if sys.platform == "linux" else None
        # Ctrl-C is for the dashboard.
        with subprocess.Popen(command, start_new_session=True, preexec_fn=ends_with_us) as attach:  # noqa: PLW1509
            try:
                spool = output.with_name(f"{output.name}.spool")
                while not any(spool.glob("process-*/")):
                    if attach.poll() is not None:
                        raise UsageError(f"process {pid} could not be followed, for the reason above.")
                    time.sleep(_POLL_S)
                yield [spool]
            finally:
                attach.send_signal(signal.SIGINT)


def require_dash() -> None:
    """Checks that the dashboard can run.

    Raises:
        UsageError: dash is not installed.
    """
    if importlib.util.find_spec("dash") is None:
        raise UsageError("the dashboard needs dash and plotly: pip install 'torch-memprof[dashboard]'")


def show_allocations(real: Path, dry: Path) -> None:
    """Serves the page that compares two sides' allocations, and opens it in a browser, until it is interrupted.

    Args:
        real: Snapshot or recording of the real device.
        dry: Those of the dry run.

    Raises:
        BadInputError: One cannot be opened.
        UsageError: dash is not installed, or no port is free.
    """
    require_dash()
    from memprof_dashboard.serve import serve
    from memprof_dashboard.state import View

    serve([real, dry], view=View(tab="allocations", other=1), say=notify)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command standalone; returns the exit code."""
    try:
        dashboard.main(args=arguments, prog_name="python -m memprof_dashboard", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except MemprofError as error:
        notify(str(error))
        return error.exit_code
    except click.Abort:
        return 130
    return 0
