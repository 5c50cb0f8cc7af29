"""The pages of `memprof predict` and `memprof verify`."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from rich.table import Table
from rich.text import Text

from memprof.analysis.diff.budget import BudgetVerdict
from memprof.analysis.plans.another_plan import PlannedJob, commands_over_budget
from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.predict import Forecast, Side, words_for_record
from memprof.analysis.plans.verify import Compared, Verification, describe_short
from memprof.analysis.report.moments import Moment
from memprof.analysis.report.notes import describe_steps
from memprof.cli.page import Page, TailCell, cell, make_table
from memprof.emit.switches import switches_of
from memprof.phases import in_order
from memprof.policies.base import NUMERICS
from memprof.policies.plan.plan_tables import NUMERICS_IN_WORDS, SOURCES_IN_WORDS
from memprof.trace.schema import CATEGORIES
from memprof.units import (
    format_bytes,
    format_bytes_between,
    format_bytes_change,
    format_us,
    format_us_between,
    printable,
    spell_bytes,
)


def fill_forecast(page: Page, made: Forecast, plan_path: Path | None, output: Path | None) -> None:
    """Adds a prediction to a page.

    Args:
        page: The page.
        made: The prediction.
        plan_path: The plan file; None if there is none.
        output: The trace that was written; None if none was.
    """
    before, after = made.recorded, made.predicted
    page.add(Text(_forecast_verdict(made), style="bold"))
    if made.plan.budget_bytes is not None:
        within = BudgetVerdict(made.plan.budget_bytes, after.peak.allocated_bytes, "predicted")
        page.add(Text(within.describe(), style="bold"))
    for warning in made.warnings:
        page.add(Text(f"warning: {printable(warning)}", style="yellow"))
    at = made.basis.at
    page.add(Text(f"{f'peak at {at}:' if at else 'peak recorded: '} {_placed(before.peak)}"))
    page.add(Text(f"peak predicted: {_placed(after.peak)}{'' if _has_moved(before, after) else ', as before'}"))
    interval = made.plan.interval
    if interval is not None and not interval.is_exact:
        bounds = format_bytes_between(interval.least_bytes, interval.most_bytes)
        page.add(Text(f"expect {bounds}: the error range of such predictions on other jobs"))
    if before.reserved_bytes is not None and after.reserved_bytes is not None:
        change = format_bytes_change(after.reserved_bytes - before.reserved_bytes)
        page.add(
            Text(
                f"reserved, as modelled: {format_bytes(before.reserved_bytes)} -> {format_bytes(after.reserved_bytes)} "
                f"({change})"
            )
        )
    times = made.plan.time_interval
    expect = "" if times is None else f", expect {format_us_between(times.least_us, times.most_us)}"
    page.add(Text(f"step time {_times(before.step_time_us, after.step_time_us)}{expect}"))
    page.add(Text(_facts(made), style="dim"))
    fill_basis(page, made.basis)
    page.add_section("Policies", _stage_table(made), "cumulative")
    phases = tuple(in_order((*before.phases, *after.phases)))
    page.add_section("Peak of each phase", _change_table("phase", _by_phase(before), _by_phase(after), phases))
    page.add_section(
        "Live bytes at the peak, by category",
        _change_table("category", before.categories, after.categories, CATEGORIES, has_total=True),
        "recorded peak and predicted peak",
    )
    page.add("")
    for source in dict.fromkeys([stage.how for stage in made.stages]):
        names = dict.fromkeys(stage.policy.name for stage in made.stages if stage.how == source)
        page.add(Text(f"{', '.join(names)}: {SOURCES_IN_WORDS.get(source, source)}", style="dim"))
    for numerics in NUMERICS[1:]:
        names = dict.fromkeys(stage.policy.name for stage in made.stages if stage.numerics == numerics)
        if names:
            page.add(Text(f"{', '.join(names)}: {NUMERICS_IN_WORDS[numerics]}"))
    if all(stage.numerics == "none" for stage in made.stages):
        page.add(Text("Numerics are bit-identical.", style="dim"))
    page.add("")
    for command, reason in _next_after_forecast(made, plan_path, output):
        page.add(Text.assemble(("next: ", "dim"), command, (f"  {reason}", "dim")))


def fill_basis(page: Page, basis: Basis) -> None:
    """Adds how the planned steps differ, and which times are not from the recording."""
    for sentence in () if basis.mix is None else basis.mix.describe():
        page.add(Text(sentence))
    if steps := describe_steps(basis.peaks):
        page.add(Text(f"{steps}; planning for the fullest, and every plan shown fits them all"))
    if basis.elsewhere is not None:
        page.add(Text(printable(basis.elsewhere.how), style="dim"))


def fill_verification(page: Page, found: Verification, head: str, plan_path: Path) -> None:
    """Adds a comparison of prediction and measurement to a page.

    Args:
        page: The page.
        found: The comparison.
        head: Path of the run under the plan, as the user gave it.
        plan_path: The plan file.
    """
    page.add(Text(printable(describe_short(found)), style="bold"))
    if found.budget is not None:
        page.add(Text(found.budget.describe(), style="bold red" if found.budget.fits is False else "bold"))
    for warning in found.warnings:
        page.add(Text(f"warning: {printable(warning)}", style="yellow"))
    page.add(Text(f"peak predicted: {printable(found.predicted.peak_place)}"))
    page.add(Text(f"peak measured:  {printable(found.measured.peak_place)}"))
    page.add(Text(f"plan: {printable(found.plan.describe())}", style="dim"))
    if not found.unlike:
        page.add_section("Counters", _counter_table(found))
        page.add_section("Peak of each phase", _compared_table("phase", found.phases))
        page.add_section("Live bytes at the peak, by category", _compared_table("category", found.categories))
    page.add("")
    for command, reason in _next_after_verification(found, head, plan_path):
        page.add(Text.assemble(("next: ", "dim"), printable(command), (f"  {reason}", "dim")))


def _forecast_verdict(made: Forecast) -> str:
    before, after = made.recorded.peak.allocated_bytes, made.predicted.peak.allocated_bytes
    if made.basis.at and not made.stages:
        return f"predicted peak at {made.basis.at}: {format_bytes(after)}"
    share = f" ({_signed_percent(after / before - 1)})" if before else ""
    change = f"{format_bytes_change(after - before)}{share}" if after != before else "no change"
    return f"predicted peak {format_bytes(after)} instead of {format_bytes(before)}: {change}"


def _placed(moment: Moment) -> str:
    return printable(f"step {moment.step}, {moment.describe()}")


def _has_moved(before: Side, after: Side) -> bool:
    return (before.peak.phase, before.peak.op, before.peak.module) != (
        after.peak.phase,
        after.peak.op,
        after.peak.module,
    )


def _times(before: float, after: float) -> str:
    change = f" ({_signed_percent(after / before - 1)})" if before and math.isfinite(after / before) else ""
    return f"{format_us(after)} instead of {format_us(before)}{change}"


def _facts(made: Forecast) -> str:
    manifest = made.manifest
    facts = [
        made.trace,
        f"torch {manifest.torch_version}" if manifest.torch_version else "",
        manifest.machine.device_name,
    ]
    return printable(" | ".join(fact for fact in facts if fact))


def _stage_table(made: Forecast) -> Table:
    table = make_table("policy", ">peak", ">change", ">step time", "source", "numerics")
    before = made.recorded.peak.allocated_bytes
    for stage in made.stages:
        table.add_row(
            cell(stage.policy.describe()),
            format_bytes(stage.peak_allocated_bytes),
            format_bytes_change(stage.peak_allocated_bytes - before),
            format_us(stage.step_time_us),
            cell(stage.how),
            cell({"none": "same"}.get(stage.numerics, stage.numerics)),
        )
        before = stage.peak_allocated_bytes
    return table


def _by_phase(side: Side) -> dict[str, int]:
    return {phase: moment.allocated_bytes for phase, moment in side.phases.items()}


def _change_table(
    what: str, before: dict[str, int], after: dict[str, int], order: tuple[str, ...], has_total: bool = False
) -> Table:
    table = make_table(what, ">recorded", ">predicted", ">change")
    names = [*order, *sorted({*before, *after} - set(order))]
    for name in names:
        old, new = before.get(name, 0), after.get(name, 0)
        if old or new:
            table.add_row(cell(name), format_bytes(old), format_bytes(new), format_bytes_change(new - old))
    if has_total:
        old, new = sum(before.values()), sum(after.values())
        table.add_row("total", format_bytes(old), format_bytes(new), format_bytes_change(new - old), style="bold")
    return table


def _counter_table(found: Verification) -> Table:
    table = make_table("counter", ">predicted", ">measured", ">error", ">of measured", "peak in")
    predicted, measured = found.predicted, found.measured
    phases = dict.fromkeys((predicted.peak_phase, measured.peak_phase))
    table.add_row(
        "peak allocated",
        format_bytes(predicted.peak_allocated_bytes),
        format_bytes(measured.peak_allocated_bytes),
        format_bytes_change(found.peak_error_bytes),
        _signed_percent(found.peak_error_ratio),
        cell(", measured ".join(phases)),
    )
    table.add_row(
        "step time",
        format_us(predicted.step_time_us),
        format_us(measured.step_time_us),
        format_us(predicted.step_time_us - measured.step_time_us),
        _signed_percent(found.time_error_ratio),
        "",
    )
    return table


def _compared_table(what: str, rows: tuple[Compared, ...]) -> Table:
    table = make_table(what, ">predicted", ">measured", ">error", ">of measured")
    for row in rows:
        error = row.predicted_bytes - row.measured_bytes
        table.add_row(
            TailCell(row.name),
            format_bytes(row.predicted_bytes),
            format_bytes(row.measured_bytes),
            format_bytes_change(error),
            _signed_percent(error / row.measured_bytes) if row.measured_bytes else "",
        )
    return table


def _signed_percent(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %" if math.isfinite(fraction) else ""


def _next_after_verification(found: Verification, head: str, plan_path: Path) -> list[tuple[str, str]]:
    over: list[tuple[str, str]] = []
    if found.budget is not None and found.budget.fits is False:
        job = PlannedJob(found.plan, plan_path, words_for_record(found.manifest))
        over = commands_over_budget(job, found.budget.measured_bytes or 0)
    return over or [(f"memprof report {shlex.quote(head)}", "what remains")]


def _next_after_forecast(made: Forecast, plan_path: Path | None, output: Path | None) -> list[tuple[str, str]]:
    job = words_for_record(made.manifest)
    commands = []
    budget = made.plan.budget_bytes
    if budget is not None and made.predicted.peak.allocated_bytes > budget:
        search = f"memprof suggest {shlex.quote(made.trace)} --budget {spell_bytes(budget)}"
        commands.append((search, "plans predicted to fit"))
    elif plan_path is not None:
        record = f"memprof record --plan {shlex.quote(str(plan_path))} {printable(job)}"
        commands.append((record, "train under it, and compare"))
    else:
        commands.append(("the same with --write plan.toml", "keep the plan, to train under it"))
    switches = switches_of(made.basis.step, made.plan)
    if plan_path is not None and switches is not None:
        commands.append((f"memprof emit {shlex.quote(str(plan_path))} --to {switches.target}", switches.words))
    if output is not None:
        commands.append((f"memprof report {shlex.quote(str(output))}", "what remains"))
    return commands
