"""The job's own files: its script and the modules it imported that are not installed."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import site
import sys
import sysconfig
from pathlib import Path

from memprof.trace.files.private_file import write_private

#: File of the spool folder with the paths of one process's own files.
_NAME = "own-files-{}.json"


def write_own_files(spool: Path) -> None:
    """Writes the paths of this process's own files to the spool folder.

    Installed packages are left out, and so are files outside ``sys.path``, such as code that a compiler generated.

    Raises:
        OSError: The file cannot be written.
    """
    installed = _folders(
        [*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "platstdlib"))]
    )
    memprof = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    searched = tuple(folder for folder in _folders([*sys.path, memprof]) if not folder.startswith(installed))
    is_installed = functools.cache(lambda folder: _folders([folder])[0].startswith(installed))  # few folders
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    loaded = [file for file in files if isinstance(file, str) and not is_installed(os.path.dirname(file))]
    paths = {os.path.realpath(file) for file in loaded if os.path.isfile(file)}
    # At exit, the script's module has no file any more.
    script = getattr(getattr(sys.modules["__main__"], "__loader__", None), "path", None)
    others = (*installed, os.path.join(memprof, ""))
    own = {path for path in paths if path.startswith(searched) and not path.startswith(others)}
    own |= {os.path.realpath(script)} if isinstance(script, str) and os.path.isfile(script) else set()
    write_private(spool / _NAME.format(os.getpid()), json.dumps(sorted(own)))


def _folders(paths: list[str]) -> tuple[str, ...]:
    return tuple(os.path.join(os.path.realpath(path or "."), "") for path in paths)


def read_own_files(spool: Path, started: float) -> dict[str, str] | None:
    """Returns the digests of a job's own files by their paths; None if one changed after the job started, or is gone.

    Args:
        spool: The recording's spool folder.
        started: Start of the job, Unix time in seconds.
    """
    found: dict[str, str] = {}
    for listed in spool.glob(_NAME.format("*")):
        for name in json.loads(listed.read_text(encoding="utf-8")):
            try:
                if os.stat(name).st_mtime > started:
                    return None
                found[name] = digest_of(Path(name))
            except OSError:
                return None
    return found


def digest_of(path: Path) -> str:
    """Returns the SHA-256 of a file's contents, in hexadecimal.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
