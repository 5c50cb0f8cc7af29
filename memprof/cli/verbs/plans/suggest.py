"""`memprof suggest`: the fastest plans under which a recorded job fits a budget."""

from __future__ import annotations

import time
from typing import Any

import click

from memprof.cli.options.command_classes import GroupedCommand, refuse_others
from memprof.cli.options.search_options import read_search_request
from memprof.cli.options.suggest_options import SuggestOptions, suggest_options


@click.command(
    cls=GroupedCommand,
    epilog="""\b
Examples:
  memprof suggest run.memprof --budget 8GiB
  memprof suggest run.memprof --budget 60% --max-slowdown 15% --write plan.toml
  memprof suggest run.memprof --budget 8GiB --check
  memprof suggest small.memprof --budget 24GiB --at-batch 64
  memprof suggest mixed.memprof --budget 24GiB --at-length 512
  memprof suggest run.memprof --device h100-80g --devices 8
  memprof suggest run.memprof --compare-planners""",
)
@suggest_options
@click.pass_context
def suggest(ctx: click.Context, /, compares_planners: bool, **flags: Any) -> int:
    """Suggest the fastest plans that make a recorded job fit a budget.

    TRACE is a recording of the unmodified job. Every plan is replayed on it as a whole; --write keeps the fastest that
    fits, for `memprof record --plan`. Ctrl-C ends the search with the best so far. The exit code is 4 if nothing fits,
    and 3 if the recording contains no complete step, whose recorded part is then shown.

    In the folder where you recorded the job, as long as its files are unchanged, it is dry-run under the best plans, as
    by `memprof record --dry-run --plan`; --write keeps the confirmed one. For other recordings this takes --check,
    which is consent; --no-run never runs anything. With --compile, it is dry-run under torch.compile, and
    the compiled plans are listed among the others.

    With --compare-planners, every published planner searches for a schedule of operators at budgets of 90 to 30 % of
    the recorded peak, and the time that each adds to the step is shown. This takes minutes: one search, of
    --time-limit at most, for each planner and budget.
    """
    begun = time.monotonic()
    if compares_planners:
        from memprof.cli.pages.suggest_page import show_comparison

        own = ("compares_planners", "trace", "step_number", "rank", "time_limit", "is_json")
        refuse_others(ctx, own, lambda _: "does not apply to --compare-planners: leave one of them out")
        show_comparison(**{name: flags[name] for name in own[1:]})
        return 0
    given = SuggestOptions.read(**flags)
    from memprof.analysis.report.whole_run import refuse_light
    from memprof.analysis.snapshot_plans.change_search import lacks_operators
    from memprof.planners.base import named_planner
    from memprof.trace.store import Trace
    from memprof.trace.whole_steps import has_whole_step

    if given.planner != "auto":  # published planners are imported for none but themselves
        named_planner(given.planner)
    opened = Trace.open(given.trace, given.rank)
    search_request = read_search_request(**given.search_flags)
    refuse_light(opened)
    if lacks_operators(opened):
        from memprof.cli.pages.incomplete_page import suggest_for_snapshot

        return suggest_for_snapshot(opened, search_request, given)
    if given.step_number is None and opened.recorded_steps and not has_whole_step(opened):
        from memprof.cli.pages.incomplete_page import suggest_for_partial

        return suggest_for_partial(opened, search_request, is_json=given.is_json)
    if given.cluster is not None:
        from memprof.cli.pages.devices_page import suggest_arrangements

        return suggest_arrangements(opened, search_request, given)
    from memprof.cli.verbs.plans.plan_search import suggest_plans

    return suggest_plans(opened, search_request, given, begun)
