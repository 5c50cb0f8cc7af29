"""What mkdocs calls while it builds the site: adds the generated pages, runs the commands, mends links out of docs/.

Set ``MEMPROF_DOCS_RUN=0`` to leave out the commands' output: then a page shows what it was written with.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from docs.building import console, reference, verbs
from docs.building.commands import ROOT, commands_of
from docs.building.workshop import Workshop
from memprof.cli.main import VERBS
from memprof.trace import schema
from tests.warm import client

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

#: Pages of the repository's root that the site shows as well.
ROOT_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "DECISIONS.md": "decisions.md",
    "AGENTS.md": "for-assistants.md",
}

#: The page that lists the verbs; their own pages follow it.
_VERBS = "verbs/index.md"

_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")

_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)

_scratch: list[tempfile.TemporaryDirectory[str]] = []
_workshops: list[Workshop] = []


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Puts the page of every verb behind the list of verbs."""
    for section in config.nav or []:
        for entries in section.values() if isinstance(section, dict) else []:
            if isinstance(entries, list) and _VERBS in entries:
                at = entries.index(_VERBS) + 1
                entries[at:at] = [{verb: f"verbs/{verb}.md"} for verb in VERBS]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what is read off the code, and the pages of the repository's root."""
    pages = {file.src_uri for file in files.documentation_pages()}
    made = {
        _VERBS: verbs.index_page(),
    }
    for verb in VERBS:
        guide = verbs.guide_of(verb, pages)
        text = (ROOT / "docs" / guide).read_text(encoding="utf-8") if guide and verb not in verbs.GUIDES else ""
        made[f"verbs/{verb}.md"] = verbs.verb_page(verb, pages, verbs.exit_code_table(text))
    for name, page in ROOT_PAGES.items():
        made[page] = (ROOT / name).read_text(encoding="utf-8")
    made["llms.txt"] = llms_text(config, made)
    for name, text in made.items():
        if name in pages:
            raise PluginError(f"docs/{name} is generated from the code: remove the file.")
        files.append(File.generated(config, name, content=text))
    return files


def llms_text(config: MkDocsConfig, made: Mapping[str, str]) -> str:
    """Returns the site's llms.txt (llmstxt.org): every page of the navigation, with its first sentence.

    Args:
        config: The site's.
        made: Generated pages, by name.
    """
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for section in config.nav or []:
        for title, entries in section.items() if isinstance(section, dict) else []:
            lines += [f"## {title}", ""]
            for entry in entries if isinstance(entries, list) else [{title: entries}]:
                (name, page), *_ = entry.items() if isinstance(entry, dict) else [("The verbs", entry)]
                text = made.get(page) or (ROOT / "docs" / page).read_text(encoding="utf-8")
                lines.append(f"- [{name}]({page.removesuffix('.md')}.html): {first_sentence(text)}")
            lines.append("")
    return "\n".join(lines)


def first_sentence(markdown: str) -> str:
    """Returns the first sentence of a page's running text, without links; its title where there is none."""
    paragraphs = re.split(r"\n\s*\n", re.sub(r"```.*?```", "", markdown, flags=re.DOTALL))
    running = (one for one in paragraphs if re.match(r"[A-Z`*\[\"]", one) and not one.startswith("    "))
    text = " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", next(running, markdown.splitlines()[0])).split())
    return re.split(r"(?<=[.?:])\s", text, maxsplit=1)[0]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Puts generated parts and the output of commands into a page, and mends its links."""
    name = page.file.src_uri
    if name == "trace-format.md":
        markdown = schema.reference()
    try:
        markdown = reference.with_generated_parts(markdown)
    except KeyError as error:
        raise PluginError(f"{name}: there is no generated part {error}") from None
    if os.environ.get("MEMPROF_DOCS_RUN") != "0" and console.entries_of(markdown):
        most = verbs.MOST_LINES if name.startswith("verbs/") else 0
        try:
            markdown = console.filled(markdown, _bench(markdown), most)
        except RuntimeError as error:
            raise PluginError(f"{name}: {error}") from None
    return _mended(_ROW.sub(_unescaped, markdown), name, files)


def on_post_build(config: MkDocsConfig) -> None:
    """Removes the scratch folder."""
    while _scratch:
        _scratch.pop().cleanup()
    _workshops.clear()


def _bench(markdown: str) -> Path:
    """Makes the folder in which a page's commands are run, with what they read.

    They run as tests' processes do, in forks of servers that have imported torch (docs/testing.md).
    """
    if not _workshops:
        client.install()
        client.set_enabled(True)
        _scratch.append(tempfile.TemporaryDirectory(prefix="memprof-docs-"))
        _workshops.append(Workshop(Path(_scratch[0].name)))
    lines = "\n".join(entry.command for entry in console.entries_of(markdown))
    return _workshops[0].bench([shlex.split(found.text) for found in commands_of(f"```\n{lines}\n```", "page")])


def _unescaped(row: re.Match[str]) -> str:
    """Writes a bar inside code of a table's row as it is: mkdocs reads it so, where other readers want it escaped."""
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0])


def _mended(markdown: str, name: str, files: Files) -> str:
    """Leads links to files outside of docs/ to their page, or names the file where the site has none."""
    folder = Path("docs") / Path(name).parent

    def mend(link: re.Match[str]) -> str:
        text, target = link["text"], link["target"]
        if name in ROOT_PAGES.values():
            path = Path(os.path.normpath(target)).as_posix()
        else:
            path = Path(os.path.normpath(folder / target)).as_posix()
        inside = path.removeprefix("docs/")
        if path in ROOT_PAGES or (path != inside and files.get_file_from_path(inside)):
            found = ROOT_PAGES.get(path, inside)
            return f"[{text}]({os.path.relpath(found, Path(name).parent)}{link['anchor'] or ''})"
        if (ROOT / path).exists() and path.startswith("..") is False and path == inside:
            return text if f"`{path}`" == text else f"{text} (`{path}` in the repository)"
        return link[0]

    return _LINK.sub(mend, markdown)
