"""Dry runs of a recorded job for ``memprof suggest``: of its best plans, and of compiled ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.errors import MemprofError

if TYPE_CHECKING:
    from memprof.analysis.plans.dry_check_results import Checked
    from memprof.analysis.plans.suggest import Suggestion
    from memprof.launch.dry.dry_compiled import CompiledPlans
    from memprof.machines.catalogue import Accelerator
    from memprof.trace.manifest import Manifest


def check_plans(
    found: Suggestion, most: int, search: Callable[..., Suggestion]
) -> tuple[Suggestion, tuple[Checked, ...]]:
    """Dry-runs the job under the best plans; if a dry run is impossible, warns and searches with more headroom.

    Before that, it is dry-run under the policies of these plans that are best not modelled, and the search repeated; it
    is repeated, too, with what a dry run took more than predicted.

    Args:
        found: The search result for plans to be checked.
        most: Maximum number of dry runs.
        search: Repeats the search, for a search request and steps from dry runs.
    """
    from memprof.analysis.plans.dry_check_results import INTERRUPTED
    from memprof.cli.harmless import notify
    from memprof.cli.progress import CheckLine
    from memprof.launch.dry.dry_check import DryChecks
    from memprof.launch.parent.settings import read_dry_window

    window = read_dry_window(Path.cwd())
    try:
        checks = DryChecks(found.manifest, window, notify)
        with CheckLine() as line:
            dry_steps = checks.steps(found, most, line.show)
        if dry_steps:
            found = search(found.answer.search_request, dry_steps)
        with CheckLine() as line:
            again = partial(search, dry_steps=dry_steps, is_shown=False)
            found, checked = checks.check(found, most, again, line.show)
    except MemprofError as error:
        why = str(error)
    else:
        why = next((one.reason for one in checked), "")
        if not why or any(one.fits is not None or one.reason == INTERRUPTED for one in checked):
            return found, checked
    unchecked = search(replace(found.answer.search_request, is_checked=False))
    return replace(unchecked, warnings=(*unchecked.warnings, f"no plan was checked: {why}")), ()


def find_compiled(found: Suggestion, most: int, is_late: Callable[[], bool]) -> CompiledPlans:
    """Dry-runs the job under torch.compile.

    Args:
        found: The search result for the job as it is.
        most: Maximum number of dry runs for each set of other policies.
        is_late: Whether no other dry run may start.
    """
    from memprof.cli.harmless import notify
    from memprof.cli.progress import CheckLine
    from memprof.launch.dry.dry_check import DryChecks
    from memprof.launch.dry.dry_compiled import CompiledPlans
    from memprof.launch.parent.settings import read_dry_window

    try:
        checks = DryChecks(found.manifest, read_dry_window(Path.cwd()), notify, option="--compile")
    except MemprofError as error:
        return CompiledPlans(reason=str(error))
    with CheckLine() as line:
        return checks.compiled(found, most, line.show, is_late)


def is_recorded_on(machine: Accelerator, manifest: Manifest) -> bool:
    """Returns whether a job was recorded on a machine of the catalogue, or dry-run on a virtual one."""
    from memprof.launch.dry.dry_job import find_recorded_device

    try:
        return find_recorded_device(manifest) == machine.name
    except MemprofError:
        return False
