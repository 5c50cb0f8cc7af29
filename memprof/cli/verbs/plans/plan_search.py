"""The search behind `memprof suggest` of a recorded job: replayed plans, then dry runs that confirm them."""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import click
from click.core import ParameterSource

from memprof.analysis.allocator.uncertainty import room_of
from memprof.analysis.plans.basis import Basis, basis_of, link_of
from memprof.analysis.plans.dry_check_results import Checked, worth_keeping
from memprof.analysis.plans.host_budget import with_host
from memprof.analysis.plans.suggest import Suggestion, suggest
from memprof.cli.options.suggest_options import SuggestOptions
from memprof.cli.page import Page
from memprof.cli.progress import SearchBar
from memprof.cli.verbs.plans.dry_runs import check_plans, find_checks, find_compiled, is_recorded_on
from memprof.errors import GateFailedError, MemprofError, UsageError
from memprof.launch.consent import find_consent
from memprof.launch.dry.dry_check import DryChecks
from memprof.launch.dry.dry_compiled import CompiledPlans
from memprof.machines.catalogue import find_machine
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.request import MakeSearchRequest, SearchRequest
from memprof.policies.compile.policy import Compile
from memprof.policies.compile.transform import policies_of_compiled
from memprof.policies.plan.several_steps import NO_DRY_STEPS, DrySteps
from memprof.trace.store import Trace

#: Dry runs of whole plans that nobody asked for.
_RUNS = 2
#: Share of the time left that a search may take if dry runs follow.
_SHARE = 0.4
#: Share of the whole time that a search may take where dry runs have left none.
_LEAST_SHARE = 0.04


@dataclass
class PlanSearch:
    """Searches for plans of a recorded job, and dry-runs the best of them.

    Attributes:
        opened: The recording.
        basis: The steps to plan for.
        request: The search request.
        runs: Maximum number of dry runs of whole plans.
        option: What requests them.
        digest: Identifies the recording and its job's files, to repeat no dry run; "" to make all of them.
        compile_runs: Maximum number of dry runs under torch.compile; None for none.
        end: ``time.monotonic`` value at which searches and dry runs end.
        shares: Whether a search must leave time for dry runs.
    """

    opened: Trace
    basis: Basis
    request: SearchRequest
    runs: int
    option: str
    digest: str
    compile_runs: int | None
    end: float
    shares: bool
    _compiled: CompiledPlans = field(default_factory=CompiledPlans)

    def find(self) -> tuple[Suggestion, tuple[Checked, ...] | None]:
        """Returns the plans, and those that were dry-run; None if none was to be.

        The process that imports torch for the dry runs starts before the first search.

        Raises:
            BadInputError: The recording is damaged.
            PolicyError: Unknown policy.
        """
        with contextlib.ExitStack() as stack:
            checks = self._checks() if self.runs else None
            if isinstance(checks, DryChecks):
                stack.enter_context(checks)
                if self.basis.peak_bytes > self.request.budget_bytes:
                    checks.prepare()
            found = self._search(self.request)
            best = found.answer.best
            if self.compile_runs is not None and (best is None or best.policies):
                self._compiled = find_compiled(found, self.compile_runs, lambda: time.monotonic() > self.end)
                measured = (*self.request.measured, *self._compiled.steps)
                found = self._search(replace(self.request, measured=measured), before=found)
                found = replace(found, warnings=(*found.warnings, *self._compiled.warnings))
            return (found, None) if checks is None else check_plans(found, self.runs, self._search, checks, self.end)

    def _checks(self) -> DryChecks | MemprofError:
        recording, manifest = str(self.opened.path), self.opened.manifest
        try:
            return find_checks(recording, manifest, self.basis, self.option, self.end, self.digest)
        except MemprofError as error:
            return error

    def _search(
        self,
        request: SearchRequest,
        dry_steps: DrySteps = NO_DRY_STEPS,
        before: Suggestion | None = None,
        *,
        is_shown: bool = True,
    ) -> Suggestion:
        basis = replace(self.basis, dry_steps={**self._compiled.steps, **dry_steps})
        whole_s = self.request.time_limit_s
        left_s = (_SHARE if self.shares else 1.0) * (self.end - time.monotonic())
        request = replace(request, time_limit_s=min(whole_s, max(left_s, _LEAST_SHARE * whole_s)))
        if not is_shown:
            return suggest(self.opened, basis, request, before=before)
        with SearchBar(request) as bar:
            return suggest(self.opened, basis, request, bar.add, before)


def suggest_plans(opened: Trace, search_request: MakeSearchRequest, given: SuggestOptions, begun: float) -> int:
    """Searches for plans of a recorded job, dry-runs the best of them where that may be, and prints the page.

    Returns:
        The exit code: 4 if nothing fits.
    """
    machine = find_machine(name) if (name := given.search_flags["machine"]) else None
    elsewhere = None if machine is None or is_recorded_on(machine, opened.manifest) else machine
    compile_runs, check = given.compile_runs, given.check
    if compile_runs is not None and elsewhere is not None:
        raise UsageError(
            "--compile dry-runs the job on the device that it was recorded on: leave out --device, or record a dry "
            f"run there (memprof record --dry-run --device {elsewhere.name})."
        )
    basis = given.size.basis(basis_of(opened, given.step_number, machine), opened, machine, given.step_number)
    is_other = given.size.option or elsewhere is not None or given.step_number is not None or given.world_size > 1
    may_run = not (is_other or given.explained is not None or given.no_run or check is not None)
    consent = find_consent(Path(given.trace)) if may_run else None
    runs = check if check is not None else _RUNS if consent is not None and not consent.reason else 0
    request = search_request(
        basis.peak_bytes,
        room_of(opened, given.world_size),
        world_size=given.world_size,
        planner=given.planner,
        link_bytes_per_us=link_of(opened, machine),
        measured=tuple(policies_of_compiled(Trace.open(path, given.rank)) for path in given.compiled),
        is_checked=runs > 0,
        is_rough=runs > 0 and compile_runs is None,
    )
    request = with_host(request, opened, elsewhere, basis.step.targets_device())
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
    return _show(found, opened, given, checked)


def _show(found: Suggestion, opened: Trace, given: SuggestOptions, checked: tuple[Checked, ...] | None) -> int:
    """Writes the plan and the page, or the plan in another format; returns the exit code."""
    explained, written = given.explained, given.written
    if explained is not None and explained > len(found.plans):
        raise UsageError(f"there is no plan {explained}: {len(found.plans)} kinds of plans fit.")
    chosen: Candidate | None = found.plans[explained - 1] if explained is not None else found.answer.best
    if checked:
        kept = worth_keeping(checked)
        chosen = next((one for one in found.plans if kept is not None and one.plan == kept.plan), None)
        written = None if chosen is None else written
    if written is not None and chosen is not None and chosen.policies:
        from memprof.policies.plan.plan_file import write_plan

        write_plan(written, found.predicted(chosen))
    if given.target is not None:
        from memprof.cli.verbs.plans.emit import print_suggested

        print_suggested(found, chosen, given.target)
    elif given.is_json:
        from memprof.analysis.plans.plan_json import suggestion_to_json

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
