"""Reserved bytes of the caching allocator under a plan: on a GPU these must fit, not only the tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from memprof.analysis.allocator.allocator_report import reserved_peak, settings_in_force
from memprof.policies.plan.plan import Plan
from memprof.policies.plan.plan_tables import plan_to_tables
from memprof.trace.manifest import PREDICTED, Manifest
from memprof.trace.step import Step


def reserved_under(step: Step, manifest: Manifest, plan: Plan | None = None) -> int | None:
    """Returns the modelled peak reserved bytes of a step.

    Args:
        step: The step, recorded or predicted.
        manifest: The manifest of its recording.
        plan: The plan it is predicted under; its allocator options apply.

    Returns:
        Bytes; None for a step on the CPU, whose allocator reserves nothing.

    Raises:
        BadInputError: torch does not accept the recorded settings.
    """
    if not step.is_on_device():
        return None
    return reserved_peak(step, settings_in_force(_with(manifest, plan), step).settings)


def reserved_expandable(step: Step, manifest: Manifest) -> int | None:
    """Returns the same with expandable segments, which fragment least; None where they are in force."""
    if not step.is_on_device():
        return None
    in_force = settings_in_force(manifest, step).settings
    if in_force.expandable_segments:
        return None
    return reserved_peak(step, dataclasses.replace(in_force, expandable_segments=True))


def _with(manifest: Manifest, plan: Plan | None) -> Manifest:
    if plan is None:
        return manifest
    tables: Mapping[str, Any] = plan_to_tables(plan)
    backend = dataclasses.replace(manifest.backend, name=PREDICTED)
    return dataclasses.replace(manifest, plan=dict(tables), backend=backend)
