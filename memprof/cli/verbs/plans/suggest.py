"""`memprof suggest`: the fastest plans under which a recorded job fits a budget."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from memprof.cli.options.cluster_options import CLUSTER_FLAGS, cluster_options, read_cluster
from memprof.cli.options.command_classes import GroupedCommand, option
from memprof.cli.options.plan_options import RequestedSize, size_options
from memprof.cli.options.search_options import read_search_request, search_options, step_options
from memprof.cli.options.shared_options import force_option, json_option, no_run_option, write_option
from memprof.emit.registry import TARGETS
from memprof.errors import UsageError
from memprof.trace.files.place import find_place, refuse_existing

if TYPE_CHECKING:
    from memprof.planners.search.request import MakeSearchRequest
    from memprof.trace.store import Trace


#: Dry runs of whole plans that nobody asked for.
_RUNS = 2
#: Options that other verbs replace.
_MOVED = {
    "--maximise": "the largest batch or the longest sequence is found by memprof largest.",
    "--compare": "planners are compared by memprof planners.",
}


class SuggestCommand(GroupedCommand):
    """A command that names the verb which replaces one of its former options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the options.

        Raises:
            click.NoSuchOption: Unknown option.
        """
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in _MOVED:
                raise
            sentence = f"{error.message.rstrip('.')}: {_MOVED[error.option_name]}"
            raise click.NoSuchOption(error.option_name, sentence, ctx=ctx) from None


@click.command(
    cls=SuggestCommand,
    epilog="""\b
Examples:
  memprof suggest run.memprof --budget 8GiB
  memprof suggest run.memprof --budget 60% --max-slowdown 15% --write plan.toml
  memprof suggest run.memprof --budget 8GiB --check
  memprof suggest small.memprof --budget 24GiB --at-batch 64
  memprof suggest mixed.memprof --budget 24GiB --at-length 512
  memprof suggest run.memprof --machine h100-80g --devices 8""",
)
@click.argument("trace", type=click.Path(), metavar="TRACE")
@search_options
@option(
    "--world-size",
    group="Search",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Number of ranks to shard over.",
)
@option(
    "--planner",
    group="Search",
    default="auto",
    metavar="NAME",
    help="How modules are chosen: by the search, or by a published planner's schedule (memprof planners).  "
    "[default: auto]",
)
@option(
    "--compiled",
    group="Search",
    multiple=True,
    type=click.Path(),
    metavar="TRACE",
    help="A recording of the job under --compile, as a plan to choose from; may be repeated.",
)
@option(
    "--check",
    group="Dry runs",
    is_flag=False,
    flag_value=3,
    type=click.IntRange(min=1),
    metavar="[N]",
    help="Dry-run the recorded job under the best plans, until one is confirmed to fit; N dry runs at most.  "
    "[default: 3]",
)
@no_run_option
@option(
    "--compile",
    "compile_runs",
    group="Dry runs",
    is_flag=False,
    flag_value=6,
    type=click.IntRange(min=1),
    metavar="[N]",
    help="Dry-run the recorded job under torch.compile, with decreasing activation budgets until it fits, and list "
    "these plans too; N dry runs at most.  [default: 6]",
)
@option(
    "--explain",
    "explained",
    group="Output",
    type=click.IntRange(min=1),
    metavar="N",
    help="Show the N-th plan in detail.",
)
@write_option("Write the fastest plan that fits to this TOML file, or the one of --explain.")
@force_option
@option(
    "--emit",
    "target",
    group="Output",
    type=click.Choice(TARGETS),
    help="Print the fastest plan that fits, or the one of --explain, as memprof emit writes it, and nothing else.",
)
@size_options
@cluster_options
@step_options
@json_option
def suggest(
    trace: str,
    world_size: int,
    planner: str,
    compiled: tuple[str, ...],
    check: int | None,
    no_run: bool,
    compile_runs: int | None,
    explained: int | None,
    written: Path | None,
    force: bool,
    target: str | None,
    batch: int | None,
    length: int | None,
    lengths: Path | None,
    also: tuple[str, ...],
    step_number: int | None,
    rank: int | None,
    is_json: bool,
    **search_flags: Any,
) -> int:
    """Suggest the fastest plans that make a recorded job fit a budget.

    TRACE is a recording of the unmodified job. Every plan is replayed on it as a whole; --write keeps the fastest that
    fits, for `memprof record --plan`. Ctrl-C ends the search with the best so far. The exit code is 4 if nothing fits,
    and 3 if the recording contains no complete step, whose recorded part is then shown.

    In the folder where you recorded the job, as long as its files are unchanged, it is dry-run under the best plans, as
    by `memprof record --dry-run --plan`; --write keeps the confirmed one. For other recordings this takes --check,
    which is consent; --no-run never runs anything. With --compile, it is dry-run under torch.compile, and
    the compiled plans are listed among the others.
    """
    begun = time.monotonic()
    cluster_request = read_cluster(**{name: search_flags.pop(name) for name in CLUSTER_FLAGS})
    if cluster_request is not None and (world_size > 1 or compiled or check or explained or target):
        raise UsageError(
            "--devices arranges the job over devices by itself: leave out --world-size, --compiled, --check, --explain "
            "and --emit."
        )
    if written is not None:
        refuse_existing(find_place(written), force=force)
    size = RequestedSize(batch, length, lengths, also)
    at = size.option
    if also and not at:
        raise UsageError("--also gives recordings of other sizes for --at-batch, --at-length or --lengths: add one.")
    if at and compiled:
        raise UsageError(f"{at} plans for a size at which no compiled run was recorded: leave out --compiled.")
    if check is not None and (at or explained is not None):
        raise UsageError(
            "--check dry-runs the job as it was recorded under the best plans: leave out --explain and other sizes "
            "such as --at-batch."
        )
    if compile_runs is not None and at:
        raise UsageError("--compile dry-runs the job as it was recorded: leave out other sizes such as --at-batch.")
    if no_run and (check is not None or compile_runs is not None):
        raise UsageError("--no-run runs nothing, --check and --compile dry-run the job: leave one of them out.")
    if target is not None and is_json:
        raise UsageError("--emit prints one plan in another form: leave out --json.")
    if compiled and search_flags["machine"]:
        raise UsageError(
            "--compiled names runs measured on one machine, whose times do not apply to that of --machine: leave one "
            "out."
        )
    from memprof.analysis.allocator.uncertainty import room_of
    from memprof.analysis.plans.basis import basis_of, link_of
    from memprof.analysis.report.whole_run import refuse_light
    from memprof.analysis.snapshot_plans.change_search import lacks_operators
    from memprof.cli.verbs.plans.dry_runs import is_recorded_on
    from memprof.cli.verbs.plans.plan_search import PlanSearch, show_plans
    from memprof.launch.consent import find_consent
    from memprof.machines.catalogue import find_machine
    from memprof.planners.base import named_planner
    from memprof.policies.compile.policy import Compile
    from memprof.policies.compile.transform import policies_of_compiled
    from memprof.trace.store import Trace
    from memprof.trace.whole_steps import has_whole_step

    if planner != "auto":  # published planners are imported for none but themselves
        named_planner(planner)
    opened = Trace.open(trace, rank)
    machine = find_machine(search_flags["machine"]) if search_flags["machine"] else None
    search_request = read_search_request(**search_flags)
    refuse_light(opened)
    elsewhere = None if machine is None or is_recorded_on(machine, opened.manifest) else machine
    if compile_runs is not None and elsewhere is not None:
        raise UsageError(
            "--compile dry-runs the job on the device that it was recorded on: leave out --machine, or record a dry "
            f"run there (memprof record --dry-run --device {elsewhere.name})."
        )
    if lacks_operators(opened):
        refused = (written, explained, target, check, compile_runs, cluster_request, size.option, *compiled)
        if any(refused):
            raise UsageError(
                f"{trace} is imported and has no operators: suggest takes --budget, --machine, --allow, --forbid, "
                "--world-size, --step, --rank and --json for it. For plan files and other sizes, record the job itself "
                "with memprof record (or --dry-run)."
            )
        return _show_snapshot(opened, step_number, search_request, world_size, is_json=is_json)
    if step_number is None and opened.recorded_steps and not has_whole_step(opened):
        return _show_partial(opened, search_request, is_json=is_json)
    basis = size.basis(basis_of(opened, step_number, machine), opened, machine, step_number)
    is_other = bool(at) or elsewhere is not None or step_number is not None or world_size > 1
    is_as_recorded = not (is_other or explained is not None or cluster_request is not None)
    consent = find_consent(Path(trace)) if is_as_recorded and not no_run and check is None else None
    runs = check if check is not None else _RUNS if consent is not None and not consent.reason else 0
    request = search_request(
        basis.peak_bytes,
        room_of(opened, world_size if cluster_request is None else cluster_request.devices),
        world_size=world_size,
        planner=planner,
        link_bytes_per_us=link_of(opened, machine),
        measured=tuple(policies_of_compiled(Trace.open(path, rank)) for path in compiled),
        is_checked=runs > 0,
        is_rough=runs > 0 and compile_runs is None,
    )
    if cluster_request is not None:
        from memprof.cli.verbs.plans.arrange import suggest_arrangements

        return suggest_arrangements(opened, basis, machine, request, cluster_request, written, is_json=is_json)

    if compile_runs is not None and Compile.name in request.forbid:
        raise UsageError("--compile lists compiled plans, which --forbid compile rules out: leave one out.")
    context = click.get_current_context()
    is_asked = bool(check or compile_runs) and context.get_parameter_source("time_limit") is ParameterSource.DEFAULT
    search = PlanSearch(
        opened,
        basis,
        request,
        runs=runs,
        option="suggest" if check is None else "--check",
        digest="" if consent is None else consent.digest,
        compile_runs=compile_runs,
        end=math.inf if is_asked else begun + request.time_limit_s,
        shares=bool(runs or compile_runs) and not is_asked,
    )
    found, checked = search.find()
    best = found.answer.best
    if not runs and consent is not None and (best is None or best.policies):
        why = f"plans are predicted, not dry-run: {consent.reason}. --check dry-runs the job all the same."
        found = replace(found, warnings=(*found.warnings, why))
    return show_plans(found, opened, explained, written, checked, target=target, is_json=is_json)


def _show_snapshot(
    opened: Trace,
    step_number: int | None,
    search_request: MakeSearchRequest,
    world_size: int,
    *,
    is_json: bool,
) -> int:
    """Prints what would make the job of an imported snapshot fit; returns the exit code."""
    from memprof.analysis.allocator.uncertainty import room_of
    from memprof.analysis.snapshot_plans.change_search import search_snapshot
    from memprof.analysis.snapshot_plans.planned_step import step_to_plan
    from memprof.cli.pages.snapshot_page import show_snapshot_plans
    from memprof.replay.live import live_bytes

    planned = step_to_plan(opened, step_number)
    peak = int(live_bytes(planned.step).during.max(initial=0))
    request = search_request(peak, room_of(opened, world_size), world_size=world_size)
    found = search_snapshot(
        opened,
        planned,
        request.budget_bytes,
        request.allow,
        request.forbid,
        request.world_size,
        counts_reserved=request.counts_reserved,
    )
    return show_snapshot_plans(found, is_json=is_json)


def _show_partial(opened: Trace, search_request: MakeSearchRequest, *, is_json: bool) -> int:
    """Prints what a recording without a complete step shows; returns the exit code."""
    from memprof.analysis.allocator.uncertainty import room_of
    from memprof.analysis.plans.partial_step import examine_partial
    from memprof.cli.pages.partial_page import show_partial

    found = examine_partial(opened)
    request = search_request(found.least_bytes, room_of(opened))
    return show_partial(found, request.budget_bytes, is_json=is_json)
