"""`memprof suggest --devices`: the fastest arrangement of a job over several devices."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memprof.analysis.plans.arrangements import ClusterRequest
    from memprof.analysis.plans.basis import Basis
    from memprof.machines.catalogue import Accelerator
    from memprof.planners.search.request import SearchRequest
    from memprof.trace.store import Trace


def suggest_arrangements(
    opened: Trace,
    basis: Basis,
    machine: Accelerator | None,
    search_request: SearchRequest,
    cluster_request: ClusterRequest,
    written: Path | None,
    *,
    is_json: bool,
) -> int:
    """Searches for arrangements, writes the plan of the fastest that memprof applies, and prints the page.

    Args:
        opened: The recording.
        basis: Its step.
        machine: The device; None for the recording's own.
        search_request: The budget, the link to the host and the time limit.
        cluster_request: The devices.
        written: Path for the plan, or None.
        is_json: Print JSON instead.

    Returns:
        The exit code: 4 if no arrangement fits.
    """
    from memprof.analysis.plans.arrangements import find_cluster, find_proposals
    from memprof.errors import GateFailedError
    from memprof.machines.catalogue import machine_of_device

    device = machine or machine_of_device(opened.manifest.machine.device_name)
    cluster = find_cluster(cluster_request, device, search_request.link_bytes_per_us, basis.step)
    deadline = time.monotonic() + search_request.time_limit_s
    found = find_proposals(
        basis, cluster, search_request.budget_bytes, cluster_request, deadline=deadline, trace=str(opened.path)
    )
    if written is not None and found.applicable is not None and found.applicable.plan is not None:
        from memprof.policies.plan.plan_file import write_plan

        write_plan(written, found.applicable.plan)
    if is_json:
        from memprof.analysis.plans.arrangements_json import arrangements_to_json

        print(json.dumps(arrangements_to_json(found), indent=2, allow_nan=False))
    else:
        from memprof.cli.pages.arrangements_page import show_arrangements

        name = device.name if device is not None else ""
        show_arrangements(found, basis.warnings, name, str(opened.path), written)
    return 0 if found.best is not None else GateFailedError.exit_code
