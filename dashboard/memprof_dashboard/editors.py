"""The editors that source lines are opened in."""

from __future__ import annotations

from memprof.errors import UsageError

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
