"""The dashboard's pages, one file each: a layout and the callbacks that fill it."""

from __future__ import annotations

from memprof_dashboard.page import Page
from memprof_dashboard.pages.allocations import AllocationsPage
from memprof_dashboard.pages.blocks import BlocksPage
from memprof_dashboard.pages.diff import DiffPage
from memprof_dashboard.pages.leaks import LeaksPage
from memprof_dashboard.pages.ranks import RanksPage
from memprof_dashboard.pages.segments import SegmentsPage
from memprof_dashboard.pages.whatif import WhatIf

#: By the name that stands in the URL, in the order of the tabs. One more page needs an entry here and nothing else.
PAGES: dict[str, Page] = {
    "whatif": WhatIf(),
    "blocks": BlocksPage(),
    "segments": SegmentsPage(),
    "leaks": LeaksPage(),
    "diff": DiffPage(),
    "allocations": AllocationsPage(),
    "ranks": RanksPage(),
}
