"""Files in the spool folder through which dry-run ranks of one job pass data to one another and to their parent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from memprof.trace.files.private_file import FOLDER_MODE, open_private

#: Folder in the spool folder.
FOLDER = "ranks"
#: Marks in it, followed by the number of a rank: this one waits for the rank whose number it contains; it has ended.
WAITING, ENDED = "waiting-", "ended-"
#: Mark in it: all ranks wait for one another.
STUCK = "stuck"
_ROLE, _SAME = "role-", "same"


@dataclass(frozen=True)
class RankRole:
    """What one rank did in its dry run.

    Attributes:
        rank: Its number.
        world_size: Ranks of the job; 0 if it never created a process group.
        groups: The process groups that the job created, each a list of global ranks, in order.
        peers: Ranks with which it exchanged tensors point to point.
        digest: A number equal for ranks that ran the same operators with results of the same sizes.
        communicators: Values of its `Communicators`.
    """

    rank: int
    world_size: int
    groups: list[list[int]]
    peers: list[int]
    digest: int
    communicators: dict[str, int] = field(default_factory=dict)

    def write(self, spool: Path) -> None:
        """Writes the role into a spool folder.

        Raises:
            OSError: It cannot be written.
        """
        folder = spool / FOLDER
        folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
        fresh = folder / f"new-{_ROLE}{self.rank}"
        with open_private(fresh, encoding="utf-8") as file:
            json.dump(asdict(self), file)
        fresh.replace(folder / f"{_ROLE}{self.rank}")


def read_role(spool: Path, rank: int) -> RankRole | None:
    """Returns a rank's role, or None if the rank left none."""
    try:
        return RankRole(**json.loads((spool / FOLDER / f"{_ROLE}{rank}").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def read_communicators(spool: Path) -> dict[str, dict[str, int]]:
    """Returns the values of each dry-run rank's `Communicators`, by its number; those without any are left out."""
    ranks = [int(path.name.removeprefix(_ROLE)) for path in (spool / FOLDER).glob(f"{_ROLE}*")]
    roles = [role for rank in sorted(ranks) if (role := read_role(spool, rank)) is not None]
    return {str(role.rank): role.communicators for role in roles if role.communicators.get("count")}


def write_same(spool: Path, same: Mapping[int, Sequence[int]]) -> None:
    """Writes which ranks do the same as each rank that was dry-run.

    Raises:
        OSError: It cannot be written.
    """
    with open_private(spool / FOLDER / _SAME, encoding="utf-8") as file:
        json.dump(same, file)


def read_same(spool: Path) -> dict[str, list[int]]:
    """Returns the ranks that do the same as each that was dry-run, by its number; empty without such ranks."""
    try:
        found: dict[str, list[int]] = json.loads((spool / FOLDER / _SAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
