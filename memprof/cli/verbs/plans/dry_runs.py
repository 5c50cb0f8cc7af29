"""Dry runs of a recorded job for ``memprof suggest``: of its best plans, and of compiled ones."""

from __future__ import annotations

import math
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

#: Searches that are repeated with the steps of dry runs, so that new plans among the best are dry-run, too.
_MOST_ROUNDS = 2


def check_plans(
    found: Suggestion,
    most: int,
    search: Callable[..., Suggestion],
    option: str = "--check",
    deadline: float = math.inf,
) -> tuple[Suggestion, tuple[Checked, ...]]:
    """Dry-runs the job under the best plans; if a dry run is impossible, warns and searches with more headroom.

    Before that, it is dry-run under the policies of these plans that change kernels, and the search repeated; it is
    repeated, too, with what a dry run took more than predicted.

    Args:
        found: The search result for plans to be checked.
        most: Maximum number of dry runs of whole plans.
        search: Repeats the search, for a search request, steps from dry runs and an earlier result.
        option: What requests the dry runs.
        deadline: ``time.monotonic`` value at which dry runs that still run are ended.
    """
    from memprof.analysis.plans.dry_check_results import INTERRUPTED
    from memprof.cli.harmless import notify
    from memprof.cli.progress import CheckLine
    from memprof.launch.dry.dry_check import DryChecks
    from memprof.launch.parent.settings import read_dry_window

    window = read_dry_window(Path.cwd())
    distrust: tuple[str, ...] = ()
    try:
        with DryChecks(found.manifest, window, notify, option, deadline, found.basis.peaks) as checks:
            dry_steps = dict(found.basis.dry_steps)
            for _ in range(_MOST_ROUNDS):
                with CheckLine() as line:
                    learned = checks.frames(found, most, line.show)
                if not learned:
                    break
                dry_steps |= learned
                found = search(found.answer.search_request, dry_steps, found)
            if checks.distrust:
                distrust = (f"{checks.distrust}, so dry runs of plans may be off as much.",)
            with CheckLine() as line:
                again = partial(search, dry_steps=dry_steps, is_shown=False)
                found, checked = checks.check(found, most, again, line.show)
    except MemprofError as error:
        why = str(error)
    else:
        found = replace(found, warnings=(*found.warnings, *distrust))
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
        window, steps = read_dry_window(Path.cwd()), found.basis.peaks
        checks = DryChecks(found.manifest, window, notify, option="--compile", steps=steps)
    except MemprofError as error:
        return CompiledPlans(reason=str(error))
    with checks, CheckLine() as line:
        return checks.compiled(found, most, line.show, is_late)


def is_recorded_on(machine: Accelerator, manifest: Manifest) -> bool:
    """Returns whether a job was recorded on a machine of the catalogue, or dry-run on a virtual one."""
    from memprof.launch.dry.dry_job import find_recorded_device

    try:
        return find_recorded_device(manifest) == machine.name
    except MemprofError:
        return False
