"""`memprof suggest --devices`: the fastest arrangement of a job over several devices."""

from __future__ import annotations

import time

from memprof.analysis.allocator.uncertainty import room_of
from memprof.analysis.arrangement.arrangement_tables import arrangements_to_json
from memprof.analysis.arrangement.arrangements import find_cluster, find_proposals
from memprof.analysis.plans.basis import basis_of, link_of
from memprof.cli.options.suggest_options import SuggestOptions
from memprof.cli.page import show
from memprof.cli.pages.arrangements_page import fill_arrangements
from memprof.errors import GateFailedError
from memprof.machines.catalogue import find_machine, machine_of_device
from memprof.planners.search.request import MakeSearchRequest
from memprof.policies.plan.plan_file import write_plan
from memprof.trace.store import Trace


def suggest_arrangements(opened: Trace, make_request: MakeSearchRequest, given: SuggestOptions) -> int:
    """Searches for arrangements, writes the plan of the fastest that memprof applies, and prints the page.

    Args:
        opened: The recording.
        make_request: Makes the search request from the recorded peak.
        given: The options.

    Returns:
        The exit code: 4 if no arrangement fits.
    """
    cluster_request, step_number, written = given.cluster, given.step_number, given.written
    assert cluster_request is not None  # --devices is given
    machine = find_machine(name) if (name := given.search_flags["machine"]) else None
    basis = given.size.basis(basis_of(opened, step_number, machine), opened, machine, step_number)
    room, link = room_of(opened, cluster_request.devices), link_of(opened, machine)
    search_request = make_request(basis.peak_bytes, room, link_bytes_per_us=link)
    device = machine or machine_of_device(opened.manifest.machine.device_name)
    cluster = find_cluster(cluster_request, device, search_request.link_bytes_per_us, basis.step)
    deadline = time.monotonic() + search_request.time_limit_s
    found = find_proposals(
        basis, cluster, search_request.budget_bytes, cluster_request, deadline=deadline, trace=str(opened.path)
    )
    if written is not None and found.applicable is not None and found.applicable.plan is not None:
        write_plan(written, found.applicable.plan)
    name = device.name if device is not None else ""
    show(
        lambda page: fill_arrangements(page, found, basis.warnings, name, str(opened.path), written),
        lambda: arrangements_to_json(found),
        is_json=given.is_json,
    )
    return 0 if found.best is not None else GateFailedError.exit_code
