"""What a build adds: the manual pages, so that `man memprof` works, and addresses for the links of README.md."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

#: A link or a picture of README.md that is relative to the repository, and what stands before it.
_RELATIVE = re.compile(r"""(?P<before>\]\(|src="|srcset=")(?![a-z]+:|#)(?P<path>[^)"\s]+)""")


def with_addresses(readme: str, repository: str, ref: str) -> str:
    """Returns README.md with absolute links and pictures.

    Args:
        readme: Its text, in Markdown.
        repository: Owner and name on GitHub.
        ref: The tag to link to.
    """

    def absolute(link: re.Match[str]) -> str:
        is_picture = link["path"].endswith((".svg", ".png"))
        base = f"https://raw.githubusercontent.com/{repository}/{ref}"
        return f"{link['before']}{base if is_picture else f'https://github.com/{repository}/blob/{ref}'}/{link['path']}"

    return _RELATIVE.sub(absolute, readme)


class Readme(MetadataHookInterface):
    """Reads README.md; a build on GitHub, such as the release workflow's, gives its links and pictures addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Sets the description that an index shows."""
        root = Path(self.root)
        text = (root / "README.md").read_text(encoding="utf-8")
        version = re.search(r'__version__ = "(.+)"', (root / "memprof" / "version.py").read_text(encoding="utf-8"))
        if version and (repository := os.environ.get("GITHUB_REPOSITORY")):
            text = with_addresses(text, repository, f"v{version[1]}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


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
