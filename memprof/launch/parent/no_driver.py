"""A program by the name of nvidia-smi for jobs on a virtual GPU: many scripts write its output to their log."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from memprof.trace.files.private_file import FOLDER_MODE

_NAME, _FOLDER = "nvidia-smi", "programs"
#: What the real program returns where no driver is loaded: it is called with options to read its numbers.
_NO_DRIVER = 9
_SCRIPT = """#!/bin/sh
echo {sentence}
[ $# -eq 0 ] || exit {status}
"""


def stand_in_for_tools(environment: Mapping[str, str], spool: Path, device: str) -> dict[str, str]:
    """Returns an environment in whose PATH nvidia-smi is found, at the end; unchanged where it is installed.

    Args:
        environment: The job's environment.
        spool: The recording's spool folder, which receives the program.
        device: The virtual device; "" for none.

    Raises:
        OSError: The program cannot be written.
    """
    path = environment.get("PATH", os.defpath)
    if not device or shutil.which(_NAME, path=path):
        return dict(environment)
    folder = spool / _FOLDER
    folder.mkdir(mode=FOLDER_MODE)
    sentence = f"memprof: dry run on a virtual {device}, without a driver"
    program = folder / _NAME
    program.write_text(_SCRIPT.format(sentence=shlex.quote(sentence), status=_NO_DRIVER), encoding="utf-8")
    program.chmod(0o700)
    return {**environment, "PATH": f"{path}{os.pathsep}{folder}"}
