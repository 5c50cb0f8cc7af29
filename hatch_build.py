"""Makes the manual pages when a wheel is built, so that `man memprof` works where it is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ManualPages(BuildHookInterface[Any]):
    """Writes the pages from the help of the verbs, which imports nothing but click."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the pages to what the wheel puts beside its packages."""
        root = Path(self.root)
        places = [str(root), str(root / "dashboard")]
        sys.path[:0] = places
        try:
            from memprof.cli.manual import write_pages

            pages = write_pages(root / "build" / "man" / "man1")
        finally:
            del sys.path[: len(places)]
        build_data["shared_data"].update({str(page): f"share/man/man1/{page.name}" for page in pages})
