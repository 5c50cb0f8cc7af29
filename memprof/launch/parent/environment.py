"""The environment that carries the recorder into the job and every Python process it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from memprof.launch.parent.settings import Settings
from memprof.launch.parent.torchrun import first_of, ranks_of, threads_of

_BOOTSTRAP = str(Path(__file__).resolve().parents[1] / "bootstrap")
_PACKAGE = str(Path(__file__).resolve().parents[2])


def recording_environment(environment: Mapping[str, str], spool: Path, settings: Settings) -> dict[str, str]:
    """Adds the bootstrap's variables to an environment.

    Args:
        environment: The environment the job would have without memprof.
        spool: Folder to which the recorders of all processes write.
        settings: What to record.

    Returns:
        A new environment, without the variables of an enclosing recording.
    """
    # An empty PYTHONPATH means none; an empty entry in one means the current folder, so it must not arise here.
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path != _BOOTSTRAP]
    python_path = os.pathsep.join([_BOOTSTRAP, *paths]) if environment.get("PYTHONPATH") and paths else _BOOTSTRAP
    child: dict[str, Any] = {"skip": settings.skip, "steps": settings.steps, "stop": settings.stop}
    if settings.goes_on:
        child["goes_on"] = True
    if settings.light:
        child["light"] = True
    if settings.dry_run:
        child["dry_run"] = True
        child["device"] = settings.device
        child["strict"] = settings.strict
        if settings.ranks:
            child["ranks"] = settings.ranks
            child["nodes"] = settings.nodes
        child["expert_load"] = settings.expert_load
        if ranks_of(settings.plan) > 1:
            child["devices"] = 1  # --shard gives each rank a machine of one device
        if settings.snapshots is not None:
            child["snapshots"], child["snapshot_name"] = str(settings.snapshots), settings.snapshot_name
    variables: dict[str, str] = {}
    if settings.plan is not None:
        from memprof.policies.plan.plan_file import format_plan  # imported here: a recording without a plan stays small

        child["plan"] = format_plan(settings.plan)
        ranks = ranks_of(settings.plan)
        variables = {**settings.plan.environment(), **threads_of(ranks, environment)}
        if settings.dry_run:
            variables |= first_of(ranks, environment)
    return {
        **environment,
        **variables,
        "PYTHONPATH": python_path,
        "MEMPROF_SPOOL": str(spool),
        "MEMPROF_SETTINGS": json.dumps(child),
        "MEMPROF_PACKAGE": _PACKAGE,
    }
