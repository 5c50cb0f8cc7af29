"""`memprof verify`: what a plan was predicted to do, held to a run under it."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(
    epilog="""\b
Examples:
  memprof verify plan.toml head.memprof
  memprof verify plan.toml run.memprof head.memprof --json"""
)
@click.argument("plan_path", type=click.Path(path_type=Path), metavar="PLAN")
@click.argument("traces", type=click.Path(), nargs=-1, required=True, metavar="[RUN] HEAD")
@click.option("--json", "is_json", is_flag=True, help="Print everything as JSON: bytes, microseconds, stable keys.")
def verify(plan_path: Path, traces: tuple[str, ...], is_json: bool) -> None:
    """Compare what a plan was predicted to do with a run under it.

    HEAD is the recording under the plan. RUN is the recording without it; the prediction is then made anew, where
    otherwise the one in the plan counts.
    """
    *runs, head = traces
    if len(runs) > 1:
        raise click.UsageError(f"One recording without the plan and one under it, not {len(traces)} traces.")
    from memprof.analysis.verify import verify_plan
    from memprof.policies.plan_file import read_plan
    from memprof.trace.store import Trace

    plan = read_plan(plan_path)
    found = verify_plan(plan, Trace.open(head), Trace.open(runs[0]) if runs else None)
    if is_json:
        from memprof.analysis.plan_json import verification_to_json

        print(json.dumps(verification_to_json(found), indent=2, allow_nan=False))
        return
    from memprof.cli.page import Page
    from memprof.cli.plan_page import fill_verification

    page = Page.for_stdout()
    fill_verification(page, found, head)
    page.write()
