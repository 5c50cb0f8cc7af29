"""The search behind `memprof suggest` of a recorded job: replayed plans, then dry runs that confirm them."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from memprof.analysis.plans.basis import Basis
from memprof.analysis.plans.dry_check_results import Checked, worth_keeping
from memprof.analysis.plans.suggest import Suggestion, suggest
from memprof.cli.page import Page
from memprof.cli.progress import SearchBar
from memprof.cli.verbs.plans.dry_runs import check_plans, find_checks, find_compiled
from memprof.errors import GateFailedError, MemprofError, UsageError
from memprof.launch.dry.dry_check import DryChecks
from memprof.launch.dry.dry_compiled import CompiledPlans
from memprof.planners.search.candidate import Candidate
from memprof.planners.search.request import SearchRequest
from memprof.policies.plan.several_steps import NO_DRY_STEPS, DrySteps
from memprof.trace.store import Trace

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


def show_plans(
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
        from memprof.cli.verbs.plans.emit import print_suggested

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
