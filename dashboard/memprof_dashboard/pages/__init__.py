"""The dashboard's pages, one file each: a layout and the callbacks that fill it."""

from __future__ import annotations

from memprof_dashboard.page import Page
from memprof_dashboard.pages.live import Live

#: By the name that stands in the URL, in the order of the tabs.
PAGES: dict[str, Page] = {
    "live": Live(),
}
