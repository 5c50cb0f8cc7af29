"""Dry runs of a recorded job for ``memprof suggest`` and ``predict``: of plans, and of compiled ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.errors import MemprofError, PolicyError

if TYPE_CHECKING:
    from memprof.analysis.plans.basis import Basis
    from memprof.analysis.plans.dry_check_results import Checked
    from memprof.analysis.plans.suggest import Suggestion
    from memprof.launch.dry.dry_check import DryChecks
    from memprof.launch.dry.dry_compiled import CompiledPlans
    from memprof.machines.catalogue import Accelerator
    from memprof.policies.base import Policy
    from memprof.policies.plan.plan import Plan
    from memprof.trace.manifest import Manifest

#: Searches that are repeated with the steps of dry runs, so that new plans among the best are dry-run, too.
_MOST_ROUNDS = 2


def find_checks(
    recording: str,
    manifest: Manifest,
    basis: Basis,
    option: str = "--check",
    deadline: float = math.inf,
    digest: str = "",
) -> DryChecks:
    """Returns the dry runs of a recording's job under plans; runs nothing yet.

    Args:
        recording: Path of the recording.
        manifest: Its manifest.
        basis: The steps as recorded.
        option: What requests the dry runs.
        deadline: ``time.monotonic`` value at which dry runs that still run are ended.
        digest: Identifies the recording and its job's files, to repeat no dry run; "" to make all of them.

    Raises:
        MemprofError: The job cannot be dry-run here.
    """
    from memprof.harmless import notify
    from memprof.launch.dry.dry_check import DryChecks
    from memprof.launch.parent.settings import read_dry_window

    window = read_dry_window(Path.cwd())
    return DryChecks(manifest, window, notify, option, deadline, digest, basis.peaks, recording)


def check_plans(
    found: Suggestion,
    most: int,
    search: Callable[..., Suggestion],
    checks: DryChecks | MemprofError,
    deadline: float = math.inf,
) -> tuple[Suggestion, tuple[Checked, ...]]:
    """Dry-runs the job under the best plans; if a dry run is impossible, warns and searches with more headroom.

    Before that, it is dry-run under the policies of these plans that change kernels, and the search repeated for those;
    it is repeated, too, with what a dry run took more than predicted.

    Args:
        found: The search result for plans to be checked.
        most: Maximum number of dry runs of whole plans.
        search: Repeats the search, for a search request, steps from dry runs and an earlier result.
        checks: What makes the dry runs (``find_checks``), used up; or why nothing can.
        deadline: ``time.monotonic`` value after which none begins.
    """
    from memprof.analysis.plans.dry_check_results import INTERRUPTED
    from memprof.analysis.plans.frames import frames_to_dry_run
    from memprof.cli.progress import CheckLine

    distrust: tuple[str, ...] = ()
    try:
        if isinstance(checks, MemprofError):
            raise checks
        with checks:
            dry_steps = dict(found.basis.dry_steps)
            for _ in range(_MOST_ROUNDS):
                begun = time.monotonic()
                with CheckLine() as line:
                    learned = checks.frames(frames_to_dry_run(found, most), found.basis, line.show)
                ended, request = time.monotonic(), found.answer.search_request
                if not (learned or request.is_rough or checks.refused.keys() - request.impossible.keys()):
                    break
                dry_steps |= learned
                frames = frozenset(((), *dry_steps)) if dry_steps else None
                request = replace(request, is_rough=False, frames=frames, impossible=dict(checks.refused))
                found = search(request, dry_steps, found)
                if time.monotonic() + 2 * (ended - begun) > deadline:  # no time for more, and then for the plan itself
                    break
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
    request = replace(found.answer.search_request, is_checked=False, is_rough=False)
    unchecked = search(request, found.basis.dry_steps, found)
    return replace(unchecked, warnings=(*unchecked.warnings, f"no plan was checked: {why}")), ()


def dry_run_plan(recording: Path, manifest: Manifest, basis: Basis, plan: Plan) -> tuple[Basis, str]:
    """Dry-runs a job under the policies of a plan that change kernels, if this user recorded it here.

    Returns:
        The steps to predict the plan from, and why they are not of dry runs, a sentence; "" if they are or need not be.

    Raises:
        PolicyError: The job refuses one of the policies, or fails under it.
    """
    from memprof.cli.progress import CheckLine
    from memprof.launch.consent import find_consent
    from memprof.policies.plan.several_steps import frame_of

    frame = frame_of(plan.policies)
    if not frame:
        return basis, ""
    consent = find_consent(recording)
    if consent.reason:
        return basis, describe_estimate(frame, consent.reason)
    frames = [frame[:count] for count in range(1, len(frame) + 1)]
    try:
        checks = find_checks(str(recording), manifest, basis, "predict", digest=consent.digest)
        with checks, CheckLine() as line:
            steps = checks.frames(frames, basis, line.show)
    except MemprofError as error:
        return basis, describe_estimate(frame, str(error))
    if checks.refused:
        raise PolicyError(next(iter(checks.refused.values())))
    if frame not in steps:
        why = checks.distrust or "its dry run has no step on the recorded inputs"
        return basis, describe_estimate(frame, why)
    return replace(basis, dry_steps=steps), ""


def describe_estimate(frame: tuple[Policy, ...], why: str = "") -> str:
    """Returns a sentence on policies that change kernels and whose effect is estimated, with the reason if given."""
    policies = ", ".join(policy.describe() for policy in frame)
    return f"{policies} is estimated, not dry-run{': ' if why else ''}{why.rstrip('.')}."


def find_compiled(found: Suggestion, most: int, is_late: Callable[[], bool]) -> CompiledPlans:
    """Dry-runs the job under torch.compile.

    Args:
        found: The search result for the job as it is.
        most: Maximum number of dry runs for each set of other policies.
        is_late: Whether no other dry run may start.
    """
    from memprof.cli.progress import CheckLine
    from memprof.launch.dry.dry_compiled import CompiledPlans

    try:
        checks = find_checks(found.trace, found.manifest, found.basis, "--compile")
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
