"""`memprof suggest`: the fastest plans under which a recorded job fits a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memprof.cli.options.search_options import read_search_request, search_options
from memprof.cli.options.size_options import AskedSize, size_options
from memprof.emit.registry import TARGETS
from memprof.errors import MemprofError, UsageError
from memprof.trace.files.place import find_place, refuse_existing

if TYPE_CHECKING:
    from collections.abc import Callable

    from memprof.analysis.plans.dry_check_results import Checked
    from memprof.analysis.plans.suggest import Suggestion
    from memprof.planners.search.explore import SearchRequest
    from memprof.planners.search.tried import Candidate
    from memprof.trace.store import Trace


@click.command(
    epilog="""\b
Examples:
  memprof suggest run.memprof --budget 8GiB
  memprof suggest run.memprof --budget 60% --max-slowdown 15% --write plan.toml
  memprof suggest run.memprof --budget 8GiB --check
  memprof suggest batch8.memprof --also batch16.memprof --maximise batch --machine rtx3090
  memprof suggest small.memprof --budget 24GiB --at-batch 64
  memprof suggest mixed.memprof --budget 24GiB --at-length 512
  memprof suggest run.memprof --budget 8GiB --devices
  memprof suggest run.memprof --compare"""
)
@click.argument("trace", type=click.Path(), metavar="TRACE")
@search_options
@click.option("--world-size", type=click.IntRange(min=1), default=1, metavar="N", help="Number of ranks to shard over.")
@click.option(
    "--planner",
    default="auto",
    metavar="NAME",
    help="How modules are chosen; auto tries all planners.  [default: auto]",
)
@click.option(
    "--compiled",
    multiple=True,
    type=click.Path(),
    metavar="TRACE",
    help="A recording of the job under --compile, as a plan to choose from; may be repeated.",
)
@click.option(
    "--check",
    is_flag=False,
    flag_value=3,
    type=click.IntRange(min=1),
    metavar="[N]",
    help="Dry-run the recorded job under the best plans, until one is confirmed to fit; N dry runs at most.  "
    "[default: 3]",
)
@click.option("--explain", "explained", type=click.IntRange(min=1), metavar="N", help="Show the N-th plan in detail.")
@click.option(
    "--write",
    "written",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the fastest plan that fits to this TOML file, or the one of --explain.",
)
@click.option("-f", "--force", is_flag=True, help="Replace the file if it exists.")
@click.option(
    "--emit",
    "target",
    type=click.Choice(TARGETS),
    help="Print the fastest plan that fits, or the one of --explain, as memprof emit writes it, and nothing else.",
)
@click.option(
    "--maximise",
    type=click.Choice(["batch", "sequence"]),
    help="Find the largest batch, or the longest sequence, that fits under some plan.",
)
@size_options
@click.option("--devices", is_flag=True, help="Print how many devices are needed: one rank's peak over 2 to 1,024.")
@click.option("--compare", is_flag=True, help="Show what every planner needs at budgets of 90 to 30 % of the peak.")
@click.option("--step", "step_number", type=click.IntRange(min=0), metavar="N", help="Plan for this step.")
@click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Plan for this rank.")
@click.option("--json", "is_json", is_flag=True, help="Print everything as JSON: bytes, microseconds, stable keys.")
def suggest(
    trace: str,
    world_size: int,
    planner: str,
    compiled: tuple[str, ...],
    check: int | None,
    explained: int | None,
    written: Path | None,
    force: bool,
    target: str | None,
    maximise: str | None,
    batch: int | None,
    length: int | None,
    lengths: Path | None,
    also: tuple[str, ...],
    devices: bool,
    compare: bool,
    step_number: int | None,
    rank: int | None,
    is_json: bool,
    **asked: Any,
) -> int:
    """Suggest the fastest plans that make a recorded job fit a budget.

    TRACE is a recording of the unmodified job. Every plan is replayed on it as a whole; --write keeps the fastest that
    fits, for `memprof record --plan`. Ctrl-C ends the search with the best so far. The exit code is 4 if nothing fits,
    and 3 if the recording contains no complete step, whose recorded part is then shown.

    With --check, in the folder where the job was recorded, the job is dry-run under the best plans, as by `memprof
    record --dry-run --plan`; --write keeps the confirmed one.
    """
    if written is not None:
        refuse_existing(find_place(written), force=force)
    size = AskedSize(batch, length, lengths, also)
    at = size.option
    if also and not maximise and not at:
        raise UsageError(
            "--also gives recordings of other sizes for --at-batch, --at-length, --lengths or --maximise: add one."
        )
    if at and (maximise or compare or compiled):
        raise UsageError(f"{at} plans for one size: leave out --maximise, --compare and --compiled.")
    if devices and (maximise or compare or compiled or at):
        raise UsageError("--devices asks how many devices the recorded job needs: leave out what asks for more.")
    if check is not None and (maximise or compare or devices or at or explained is not None):
        raise UsageError(
            "--check dry-runs the job as it was recorded under the best plans: leave out --maximise, --compare, "
            "--devices, --explain and other sizes such as --at-batch."
        )
    if target is not None and (maximise or compare or devices or is_json):
        raise UsageError(
            "--emit prints one plan in another form: leave out --maximise, --compare, --devices and --json."
        )
    if compiled and asked["machine"]:
        raise UsageError(
            "--compiled names runs of one machine, which say nothing of the time on that of --machine: leave out one."
        )
    if maximise == "sequence" and not also:
        raise UsageError(
            "--maximise sequence needs the job recorded at two lengths: add the other recording with --also TRACE."
        )
    from memprof.machines.catalogue import find_machine
    from memprof.planners.registry import named_planner
    from memprof.trace.store import Trace

    named_planner(planner)
    opened = Trace.open(trace, rank)
    if compare:
        from memprof.cli.pages.compare_page import show_comparison

        show_comparison(opened, step_number, float(asked["time_limit"]), is_json=is_json)
        return 0
    machine = find_machine(asked["machine"]) if asked["machine"] else None
    search_request = read_search_request(**asked)
    if devices:
        from memprof.analysis.plans.basis import basis_of
        from memprof.cli.pages.devices_page import show_devices

        basis = basis_of(opened, step_number, machine)
        return show_devices(basis, str(opened.path), search_request, machine, written, is_json=is_json)
    if maximise:
        from memprof.analysis.plans.basis import basis_of
        from memprof.cli.pages.largest_page import show_largest

        others = [Trace.open(path, rank) for path in also]
        status = show_largest(
            [basis_of(trace, step_number, machine) for trace in (opened, *others)],
            str(opened.path),
            search_request,
            maximise,
            written,
            is_json=is_json,
        )
    else:
        from memprof.analysis.out_of_memory.post_mortem import has_whole_step
        from memprof.analysis.plans.basis import basis_of, link_of
        from memprof.analysis.plans.suggest import suggest as search
        from memprof.cli.progress import SearchBar
        from memprof.policies.compile.measured import policies_of_compiled

        if step_number is None and opened.recorded_steps and not has_whole_step(opened):
            return _show_partial(opened, search_request, is_json=is_json)
        basis = size.basis(basis_of(opened, step_number, machine), opened, machine, step_number)
        asked_for = search_request(
            basis.peak_bytes,
            world_size=world_size,
            planner=planner,
            link_bytes_per_us=link_of(opened, machine),
            measured=tuple(policies_of_compiled(Trace.open(path, rank)) for path in compiled),
            is_checked=check is not None,
        )

        def searched(search_request: SearchRequest) -> Suggestion:
            with SearchBar(search_request) as bar:
                return search(opened, basis, search_request, bar.add)

        found, checked = searched(asked_for), None
        if check is not None:
            found, checked = _check(found, check, searched)
        status = _show(found, opened, explained, written, checked, target=target, is_json=is_json)
    return status


def _check(
    found: Suggestion, most: int, search: Callable[[SearchRequest], Suggestion]
) -> tuple[Suggestion, tuple[Checked, ...]]:
    """Dry-runs the job under the best plans; if a dry run is impossible, warns and searches with more headroom.

    Args:
        found: The search result for plans to be checked.
        most: Maximum number of dry runs.
        search: Repeats the search.
    """
    import dataclasses

    from memprof.analysis.plans.dry_check_results import INTERRUPTED
    from memprof.cli.harmless import tell
    from memprof.cli.progress import CheckLine
    from memprof.launch.dry.dry_check import check_plans
    from memprof.launch.parent.settings import read_dry_window

    window = read_dry_window(Path.cwd())
    try:
        with CheckLine() as line:
            checked = check_plans(found, most, window, tell, line.show)
    except MemprofError as error:
        why = str(error)
    else:
        why = next((one.reason for one in checked), "")
        if not why or any(one.fits is not None or one.reason == INTERRUPTED for one in checked):
            return found, checked
    unchecked = search(dataclasses.replace(found.answer.search_request, is_checked=False))
    return dataclasses.replace(unchecked, warnings=(*unchecked.warnings, f"no plan was checked: {why}")), ()


def _show_partial(opened: Trace, search_request: Callable[..., SearchRequest], *, is_json: bool) -> int:
    """Prints what a recording without a complete step shows; returns the exit code."""
    from memprof.analysis.plans.partial_step import examine_partial
    from memprof.cli.pages.partial_page import show_partial

    found = examine_partial(opened)
    return show_partial(found, search_request(found.least_bytes).budget_bytes, is_json=is_json)


def _show(
    found: Suggestion,
    opened: Trace,
    explained: int | None,
    written: Path | None,
    checked: tuple[Checked, ...] | None,
    *,
    target: str | None,
    is_json: bool,
) -> int:
    """Writes the plan and the page, or the plan in another format; returns the exit code."""
    from memprof.analysis.plans.dry_check_results import worth_keeping
    from memprof.cli.page import Page
    from memprof.errors import GateFailedError

    if explained is not None and explained > len(found.plans):
        raise UsageError(f"There is no plan {explained}: {len(found.plans)} kinds of plans fit.")
    chosen: Candidate | None = found.plans[explained - 1] if explained is not None else found.answer.best
    if checked:
        kept = worth_keeping(checked)
        chosen = next((one for one in found.plans if kept is not None and one.plan == kept.plan), None)
        written = None if chosen is None else written
    if written is not None and chosen is not None and chosen.policies:
        from memprof.policies.plan.plan_file import write_plan

        write_plan(written, found.predicted(chosen))
    if target is not None:
        from memprof.cli.verbs.emit import print_suggested

        print_suggested(found, chosen, target)
    elif is_json:
        from memprof.analysis.plans.suggest_json import suggestion_to_json

        print(json.dumps(suggestion_to_json(found, checked), indent=2, allow_nan=False))
    else:
        page = Page.for_stdout()
        if explained is not None and chosen is not None:
            from memprof.analysis.plans.predict import forecast
            from memprof.cli.pages.plan_page import fill_forecast

            fill_forecast(page, forecast(opened, chosen.plan, found.basis), written, None)
        else:
            from memprof.cli.pages.suggest_page import fill_suggestion

            fill_suggestion(page, found, written, checked)
        page.write()
    return 0 if chosen is not None else GateFailedError.exit_code
