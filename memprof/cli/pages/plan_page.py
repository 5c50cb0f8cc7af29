"""The pages of `memprof predict` and `memprof verify`."""

from __future__ import annotations

import math
import shlex
from pathlib import Path

from memprof.analysis.diff.budget import BudgetVerdict
from memprof.analysis.plans.another_plan import PlannedJob, commands_over_budget, unused_file
from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.plan_json import CATEGORIES, PHASES, changes, counters
from memprof.analysis.plans.plan_rows import stages
from memprof.analysis.plans.predict import Forecast, commands_under, words_for_record
from memprof.analysis.plans.verify import Verification, describe_short
from memprof.analysis.report.moments import Moment
from memprof.analysis.report.notes import describe_steps
from memprof.analysis.table import FactTable
from memprof.cli.page import Page
from memprof.cli.pages.next_commands import again
from memprof.emit.switches import switches_of
from memprof.policies.base import NUMERICS
from memprof.policies.plan.plan_tables import NUMERICS_IN_WORDS, SOURCES_IN_WORDS
from memprof.units import (
    format_bytes,
    format_bytes_between,
    format_bytes_change,
    format_percent_change,
    format_us,
    format_us_between,
    spell_bytes,
)


def fill_forecast(page: Page, made: Forecast, plan_path: Path | None, output: Path | None) -> None:
    """Adds a prediction to a page."""
    before, after = made.recorded, made.predicted
    page.say(_forecast_verdict(made), "bold")
    if made.plan.budget_bytes is not None:
        within = BudgetVerdict(made.plan.budget_bytes, after.peak.allocated_bytes, "predicted")
        page.say(within.describe(), "bold")
    page.warn(*made.warnings)
    at = made.basis.at
    page.say(f"{f'peak at {at}:' if at else 'peak recorded: '} {_placed(before.peak)}")
    places = {(one.peak.phase, one.peak.op, one.peak.module) for one in (before, after)}
    page.say(f"peak predicted: {_placed(after.peak)}{', as before' if len(places) == 1 else ''}")
    interval = made.plan.interval
    if interval is not None and not interval.is_exact:
        bounds = format_bytes_between(interval.least_bytes, interval.most_bytes)
        page.say(f"expect {bounds}: the error range of such predictions on other jobs")
    if before.reserved_bytes is not None and after.reserved_bytes is not None:
        change = format_bytes_change(after.reserved_bytes - before.reserved_bytes)
        sizes = f"{format_bytes(before.reserved_bytes)} -> {format_bytes(after.reserved_bytes)}"
        page.say(f"reserved, as modelled: {sizes} ({change})")
    times = made.plan.time_interval
    expect = "" if times is None else f", expect {format_us_between(times.least_us, times.most_us)}"
    page.say(f"step time {_times(before.step_time_us, after.step_time_us)}{expect}")
    page.say(_facts(made), "dim")
    fill_basis(page, made.basis)
    if made.stages:
        page.add_section("Policies", stages(made), "cumulative")
    page.add_section("Peak of each phase", changes("phase", before, after))
    title = "Live bytes at the peak, by category"
    page.add_section(title, changes("category", before, after), "recorded peak and predicted peak")
    page.add("")
    for source in dict.fromkeys([stage.how for stage in made.stages]):
        names = dict.fromkeys(stage.policy.name for stage in made.stages if stage.how == source)
        page.say(f"{', '.join(names)}: {SOURCES_IN_WORDS.get(source, source)}", "dim")
    for numerics in NUMERICS[1:]:
        names = dict.fromkeys(stage.policy.name for stage in made.stages if stage.numerics == numerics)
        if names:
            page.say(f"{', '.join(names)}: {NUMERICS_IN_WORDS[numerics]}")
    if all(stage.numerics == "none" for stage in made.stages):
        page.say("Numerics are bit-identical.", "dim")
    page.add_next(*_next_after_forecast(made, plan_path, output))


def fill_basis(page: Page, basis: Basis) -> None:
    """Adds how the planned steps differ, and which times are not from the recording."""
    for sentence in () if basis.mix is None else basis.mix.describe():
        page.say(sentence)
    if steps := describe_steps(basis.peaks):
        page.say(f"{steps}; planning for the fullest, and every plan shown fits them all")
    if basis.elsewhere is not None:
        page.say(basis.elsewhere.how, "dim")


def fill_verification(page: Page, found: Verification, head: str, plan_path: Path) -> None:
    """Adds a comparison of prediction and measurement to a page."""
    page.say(describe_short(found), "bold")
    if found.budget is not None:
        page.say(found.budget.describe(), "bold red" if found.budget.fits is False else "bold")
    page.warn(*found.warnings)
    page.say(f"peak predicted: {found.predicted.peak_place}")
    page.say(f"peak measured:  {found.measured.peak_place}")
    page.say(f"plan: {found.plan.describe()}", "dim")
    if not found.unlike:
        sides = (found.predicted, found.measured)
        peaks, times = (one.peak_allocated_bytes for one in sides), (one.step_time_us for one in sides)
        page.add_section("Counters", counters(peaks, times, (one.peak_phase for one in sides)))
        page.add_section("Peak of each phase", FactTable(PHASES, found.phases))
        page.add_section("Live bytes at the peak, by category", FactTable(CATEGORIES, found.categories))
    page.add_next(*_next_after_verification(found, head, plan_path))


def _forecast_verdict(made: Forecast) -> str:
    before, after = made.recorded.peak.allocated_bytes, made.predicted.peak.allocated_bytes
    if made.basis.at and not made.stages:
        return f"predicted peak at {made.basis.at}: {format_bytes(after)}"
    share = f" ({format_percent_change(after / before - 1)})" if before else ""
    change = f"{format_bytes_change(after - before)}{share}" if after != before else "no change"
    return f"predicted peak {format_bytes(after)} instead of {format_bytes(before)}: {change}"


def _placed(moment: Moment) -> str:
    return f"step {moment.step}, {moment.describe()}"


def _times(before: float, after: float) -> str:
    change = f" ({format_percent_change(after / before - 1)})" if before and math.isfinite(after / before) else ""
    return f"{format_us(after)} instead of {format_us(before)}{change}"


def _facts(made: Forecast) -> str:
    manifest = made.manifest
    facts = [
        made.trace,
        f"torch {manifest.torch_version}" if manifest.torch_version else "",
        manifest.machine.device_name,
    ]
    return " | ".join(fact for fact in facts if fact)


def _next_after_verification(found: Verification, head: str, plan_path: Path) -> list[tuple[str, str]]:
    over: list[tuple[str, str]] = []
    if found.budget is not None and found.budget.fits is False:
        job = PlannedJob(found.plan, plan_path, words_for_record(found.manifest))
        over = commands_over_budget(job, found.budget.measured_bytes or 0)
    return over or [(f"memprof report {shlex.quote(head)}", "what remains")]


def _next_after_forecast(made: Forecast, plan_path: Path | None, output: Path | None) -> list[tuple[str, str]]:
    commands: list[tuple[str, str]] = []
    budget = made.plan.budget_bytes
    if budget is not None and made.predicted.peak.allocated_bytes > budget:
        search = f"memprof suggest {shlex.quote(made.trace)} --budget {spell_bytes(budget)}"
        commands.append((search, "plans predicted to fit"))
    elif plan_path is not None:
        *dry, train = commands_under(made.manifest, str(plan_path))
        commands += [
            *((command, "dry-run it under the plan") for command in dry),
            (train, "train under it, and compare"),
        ]
    else:
        commands.append((again("--write", unused_file("plan", ".toml")), "keep the plan, to train under it"))
    switches = switches_of(made.basis.step, made.plan)
    if plan_path is not None and switches is not None:
        commands.append((f"memprof emit {shlex.quote(str(plan_path))} --to {switches.target}", switches.words))
    if output is not None:
        commands.append((f"memprof report {shlex.quote(str(output))}", "what remains"))
    return commands
