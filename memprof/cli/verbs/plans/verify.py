"""`memprof verify`: compares a plan's prediction with a run under it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memprof.cli.options.shared_options import json_option

if TYPE_CHECKING:
    from memprof.policies.plan.plan import Plan


@click.command(
    epilog="""\b
Examples:
  memprof verify plan.toml head.memprof
  memprof verify plan.toml run.memprof head.memprof --json"""
)
@click.argument("plan_path", type=click.Path(path_type=Path), metavar="PLAN")
@click.argument("traces", type=click.Path(), nargs=-1, required=True, metavar="[RUN] HEAD")
@json_option
def verify(plan_path: Path, traces: tuple[str, ...], is_json: bool) -> int:
    """Compare a plan's prediction with a run under it.

    HEAD is the recording under the plan. RUN is the recording without it, from which the prediction is recomputed;
    otherwise the plan's own is used. Steps with the same shapes are compared; the exit code is 3 if HEAD has none. If
    the plan has a budget, the highest recorded step of HEAD is compared with it: the exit code is 4 if it is over.
    """
    *runs, head = traces
    if len(runs) > 1:
        raise click.UsageError(f"one recording without the plan and one under it, not {len(traces)} traces.")
    from memprof.analysis.plans.plan_json import verification_to_json
    from memprof.analysis.plans.verify import verify_plan
    from memprof.cli.page import show
    from memprof.cli.pages.plan_page import fill_verification
    from memprof.policies.plan.plan_file import read_plan
    from memprof.trace.store import Trace

    plan = read_plan(plan_path)
    if plan.prediction is None and plan.budget_bytes is not None and not runs:
        return _judge_alone(plan, plan_path, head, is_json=is_json)
    found = verify_plan(plan, Trace.open(head), Trace.open(runs[0]) if runs else None)
    show(
        lambda page: fill_verification(page, found, head, plan_path),
        lambda: verification_to_json(found),
        is_json=is_json,
    )
    return found.exit_code


def _judge_alone(plan: Plan, plan_path: Path, head: str, *, is_json: bool) -> int:
    """Compares a run with the budget of a plan that has no prediction; returns the exit code."""
    from memprof.analysis.diff.budget import judge_budget
    from memprof.analysis.plans.predict import words_for_record
    from memprof.trace.store import Trace

    trace = Trace.open(head)
    found = judge_budget(trace, plan.budget_bytes or 0)
    if is_json:
        from memprof.analysis.plans.plan_json import PLAN_SCHEMA

        print(json.dumps({"schema": PLAN_SCHEMA, **found.to_json()}, indent=2))
        return found.exit_code
    from memprof.analysis.plans.another_plan import PlannedJob, commands_over_budget
    from memprof.units import printable

    print(printable(found.describe()))
    if found.fits is False:
        job = PlannedJob(plan, plan_path, words_for_record(trace.manifest))
        for command, reason in commands_over_budget(job, found.measured_bytes or 0):
            print(printable(f"next: {command}  {reason}"))
    return found.exit_code
