"""`memprof attach`: what fills the memory of a job that is running, without a restart."""

from __future__ import annotations

import click

from memprof.cli.page import show
from memprof.errors import UsageError
from memprof.harmless import notify


@click.command(
    epilog="""\b
Examples:
  memprof attach --list
  memprof attach 4711 --dump
  memprof attach 4711 --dump --json > now.json"""
)
@click.argument("pid", type=click.IntRange(min=1), required=False)
@click.option("--list", "is_list", is_flag=True, help="List this user's processes that have torch loaded.")
@click.option("--dump", "is_dump", is_flag=True, help="Show what is alive now, once.")
@click.option("--rows", type=click.IntRange(min=1), default=None, help="Rows per table.")
@click.option("--wait", "wait_s", type=click.FloatRange(min=0.1), default=30.0, show_default=True,
              help="Longest wait for the job's main thread, in seconds.")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
def attach(pid: int | None, is_list: bool, is_dump: bool, rows: int | None, wait_s: float, is_json: bool) -> None:
    """Look into a job that is running, or record some of its steps, without a restart.

    The job goes on as if nothing had happened: losses, random numbers, output and exit status stay as they are.
    """
    from memprof.cli.pages.attach_page import attach_json, fill_dump, fill_list, list_json
    from memprof.launch.attach.processes import list_processes

    if is_list:
        found = list_processes()
        show(lambda page: fill_list(page, found), lambda: list_json(found), is_json=is_json)
        return
    if pid is None:
        raise UsageError("no process given: memprof attach PID --dump; memprof attach --list shows which there are.")
    if is_dump:
        from memprof.launch.attach.dump import dump

        one = dump(pid, notify, wait_s)
        show(lambda page: fill_dump(page, one, rows), lambda: attach_json(one, rows), is_json=is_json)
        return
    raise UsageError("nothing to do: add --dump to see what is alive now.")


