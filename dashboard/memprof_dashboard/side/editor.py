"""Source lines named by a recording: their text, and links that open them in an editor."""

from __future__ import annotations

import linecache
from pathlib import Path
from urllib.parse import quote

from memprof.errors import UsageError
from memprof.trace.source_lines import is_source_file

#: Addresses that editors open, by the editor's name.
EDITORS = {
    "vscode": "vscode://file{file}:{line}",
    "vscode-insiders": "vscode-insiders://file{file}:{line}",
    "vscodium": "vscodium://file{file}:{line}",
    "cursor": "cursor://file{file}:{line}",
    "windsurf": "windsurf://file{file}:{line}",
    "zed": "zed://file{file}:{line}",
    "pycharm": "pycharm://open?file={file}&line={line}",
    "none": "",
}


def address_of_editor(name: str) -> str:
    """Returns the address that opens a line in an editor.

    Args:
        name: One of EDITORS, or an address with ``{file}`` and ``{line}``, which is returned unchanged.

    Raises:
        UsageError: It is neither.
    """
    address = EDITORS.get(name, name)
    if address and not ("://" in address and "{file}" in address):
        raise UsageError(
            f"unknown editor {name!r}: give one of {', '.join(EDITORS)}, or an address such as "
            "'vscode://vscode-remote/ssh-remote+HOST{file}:{line}'"
        )
    return address


def link_to(address: str, file: str, number: int) -> str:
    """Returns the address that opens a line of a file that is on this machine; "" where there is none."""
    if not address or not _is_source(file):
        return ""
    return address.replace("{file}", quote(file)).replace("{line}", str(number))


def source_text(file: str, number: int) -> str:
    """Returns a line of a Python file on this machine, stripped; "" where there is none."""
    if not _is_source(file):
        return ""
    linecache.checkcache(file)
    return linecache.getline(file, number).strip()


def _is_source(file: str) -> bool:
    return Path(file).is_absolute() and is_source_file(file)
