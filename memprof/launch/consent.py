"""Which recordings may be followed by dry runs of their job that nobody asked for: those that this user made here.

``memprof record`` notes the digest of each recording in the user's state folder, with the folder that the job ran in
and the digests of its own files. A recording that came from elsewhere, or was changed, has no note.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memprof.launch.outcome.output import spool_of
from memprof.launch.own_files import digest_of
from memprof.trace.files.private_file import make_private_folder, user_folder, write_private

#: Notes that are kept, the newest ones.
_MOST_NOTES = 1_000


@dataclass(frozen=True)
class Consent:
    """Whether the job of a recording may be dry-run unasked.

    Attributes:
        reason: Why not, a clause; "" if it may.
        digest: Identifies the recording and the job's files; "" where it may not.
    """

    reason: str
    digest: str = ""


def state_folder() -> Path:
    """Returns the user's folder for notes on recordings (XDG Base Directory Specification)."""
    return user_folder("XDG_STATE_HOME", ".local/state") / "memprof" / "recordings"


def cache_folder() -> Path:
    """Returns the user's folder for dry runs that need not be repeated."""
    return user_folder("XDG_CACHE_HOME", ".cache") / "memprof" / "frames"


def note_recording(output: Path, files: dict[str, str] | None) -> None:
    """Notes that this user made a recording here; without a note, its job is dry-run only where that is asked for.

    Args:
        output: The recording.
        files: Digests of the job's own files; None if they changed while it ran.
    """
    folder = state_folder()
    note = {"folder": os.getcwd(), "files": files}
    with contextlib.suppress(OSError):  # a home that cannot be written: dry runs then need --check
        make_private_folder(folder)
        write_private(folder / f"{digest_of(output)}.json", json.dumps(note))
        notes = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for path in notes[:-_MOST_NOTES]:
            path.unlink(missing_ok=True)


def find_consent(recording: Path) -> Consent:
    """Returns whether the job of a recording may be dry-run unasked, in the current folder."""
    if spool_of(recording).exists():
        return Consent("its recording is not finished")
    try:
        digest = digest_of(recording)
        path = state_folder() / f"{digest}.json"
        if path.stat().st_uid != os.geteuid():
            return Consent(f"{path} belongs to another user")
        note: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        folder, files = str(note["folder"]), note["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return Consent("this user did not record it here")
    if os.path.realpath(folder) != os.path.realpath("."):
        return Consent(f"it was recorded in {folder}")
    if not files:
        return Consent("its files changed while it was recorded" if files is None else "it runs no file of its own")
    for name, known in files.items():
        try:
            is_same = digest_of(Path(name)) == known
        except OSError:
            is_same = False
        if not is_same:
            return Consent(f"{os.path.relpath(name)} has changed since")
    return Consent("", digest)
