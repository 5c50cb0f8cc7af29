"""The dashboard's pages, one file each: a layout and the callbacks that fill it."""

from __future__ import annotations

from memprof.trace.schema import Segments
from memprof_dashboard.page import Page
from memprof_dashboard.pages.allocations import AllocationsPage
from memprof_dashboard.pages.blocks import BlocksPage
from memprof_dashboard.pages.diff import DiffPage
from memprof_dashboard.pages.host import HostPage, has_host_memory
from memprof_dashboard.pages.leaks import LeaksPage
from memprof_dashboard.pages.ranks import RanksPage
from memprof_dashboard.pages.segments import SegmentsPage
from memprof_dashboard.pages.whatif import WhatIf
from memprof_dashboard.sources import Workspace
from memprof_dashboard.state import View

#: By the name that stands in the URL, in the order of the tabs. One more page needs an entry here and nothing else.
PAGES: dict[str, Page] = {
    "whatif": WhatIf(),
    "blocks": BlocksPage(),
    "segments": SegmentsPage(),
    "leaks": LeaksPage(),
    "diff": DiffPage(),
    "allocations": AllocationsPage(),
    "ranks": RanksPage(),
    "host": HostPage(),
}


def empty_pages(workspace: Workspace, view: View) -> dict[str, str]:
    """Returns the pages that have nothing to show of a recording, by name, each with the reason.

    Raises:
        MemprofError: The recording cannot be read.
    """
    rank, source = workspace.rank(view.trace, view.rank), workspace.source(view.trace)
    reasons = {}
    if not len(rank.trace.table(Segments)):
        is_cpu = rank.trace.manifest.machine.device_kind == "cpu"
        reasons["segments"] = "no caching allocator on CPU" if is_cpu else "the allocator was not recorded"
    if rank.leaks.growth.bytes_per_step is None and len(workspace.sources) < 3:  # of more, the series is shown
        reasons["leaks"] = "too few steps to tell whether memory grows"
    if len(workspace.sources) < 2:
        reasons |= dict.fromkeys(("diff", "allocations"), "needs two recordings")
    if len(source.trace.ranks) < 2:
        reasons["ranks"] = "recorded one process"
    if not has_host_memory(rank.trace):
        reasons["host"] = "too few samples of host memory"
    return reasons
