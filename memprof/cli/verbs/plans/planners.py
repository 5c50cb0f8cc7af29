"""`memprof planners`: every planner on one recorded step, at several budgets."""

from __future__ import annotations

import click


@click.command(
    epilog="""\b
Examples:
  memprof planners run.memprof
  memprof planners run.memprof --time-limit 5 --json"""
)
@click.argument("trace", type=click.Path(), metavar="TRACE")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0.1),
    default=60.0,
    metavar="SECONDS",
    show_default=True,
    help="Time limit of each search.",
)
@click.option("--step", "step_number", type=click.IntRange(min=0), metavar="N", help="Compare on this step.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Compare on this rank.")
@click.option("--json", "is_json", is_flag=True, help="Print everything as JSON: bytes, stable keys.")
def planners(trace: str, time_limit: float, step_number: int | None, rank: int | None, is_json: bool) -> None:
    """Compare the planners on a recorded job.

    Every planner searches for a schedule of operators at budgets of 90 to 30 % of the recorded peak; the table shows
    the time that each adds to the step. This takes minutes: one search for each planner and budget.
    """
    from memprof.cli.pages.compare_page import show_comparison
    from memprof.trace.store import Trace

    show_comparison(Trace.open(trace, rank), step_number, time_limit, is_json=is_json)
