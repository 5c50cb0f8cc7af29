"""`memprof attach`: what fills the memory of a job that is running, without a restart."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from memprof.errors import UsageError
from memprof.harmless import notify


@click.command(
    epilog="""\b
Examples:
  memprof attach --list
  memprof attach 4711 --dump
  memprof attach 4711 -o run.memprof --steps 3
  memprof attach 4711 -o night.memprof --light"""
)
@click.argument("pid", type=click.IntRange(min=1), required=False)
@click.option("--list", "is_list", is_flag=True, help="List this user's processes that have torch loaded.")
@click.option("--dump", "is_dump", is_flag=True, help="Show what is alive now, once.")
@click.option("-o", "output", type=click.Path(path_type=Path), metavar="FILE", help="Record the job's next steps.")
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps to record.")
@click.option("--light", is_flag=True, help="Follow every step at low overhead until Ctrl-C or the job's end.")
@click.option("-f", "force", is_flag=True, help="Overwrite an existing recording.")
@click.option("--alone", is_flag=True, help="Attach to this process only: by default a launcher stands for its ranks.")
@click.option("--rows", type=click.IntRange(min=1), default=None, help="Rows per table.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    help="Longest wait for the job's main thread, in seconds.",
)
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def attach(
    pid: int | None,
    is_list: bool,
    is_dump: bool,
    output: Path | None,
    steps: int,
    light: bool,
    force: bool,
    alone: bool,
    rows: int | None,
    wait_s: float,
    is_json: bool,
) -> None:
    """Look into a job that is running, or record some of its steps, without a restart.

    The job goes on as if nothing had happened: losses, random numbers, output and exit status stay as they are. PID is
    a training process or a launcher, such as torchrun, whose ranks are then attached together. The exit status is 2 if
    the process may not be attached to, and 3 if it ended or did not answer in time.
    """
    from memprof.cli.page import show  # slow to import: the help needs none of it
    from memprof.cli.pages.attach_page import dump_json, fill_dump, fill_list, list_json
    from memprof.launch.attach.processes import list_processes, ranks_below

    if is_list:
        found = list_processes()
        show(lambda page: fill_list(page, found), lambda: list_json(found), is_json=is_json)
        return
    if pid is None:
        raise UsageError("no process given: memprof attach PID --dump; memprof attach --list shows which there are.")
    if is_dump == (output is not None):
        raise UsageError("add --dump to see what is alive now, or -o FILE to record the next steps: one of them.")
    from memprof.launch.attach.session import Session

    with ExitStack() as stack:
        pids = [] if alone else ranks_below(pid)
        sessions = [stack.enter_context(Session(one, notify, wait_s)) for one in pids or [pid]]
        if output is None:
            from memprof.launch.attach.dump import dump

            dumps = [dump(session) for session in sessions]
            stack.close()
            show(lambda page: fill_dump(page, dumps, rows), lambda: dump_json(dumps, rows), is_json=is_json)
            return
        from memprof.launch.attach.recording import record_running

        packed = record_running(sessions, output, steps=steps, light=light, force=force, say=notify)
        notify(packed.message)
