"""Files in the spool folder through which dry-run ranks of one job pass data to one another and to their parent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from memprof.trace.files.private_file import FOLDER_MODE, open_private

#: Folder in the spool folder.
FOLDER = "ranks"
#: Marks in it, followed by the number of a rank: this one waits for the rank whose number it contains; it has ended.
WAITING, ENDED = "waiting-", "ended-"
#: Mark in it: all ranks wait for one another.
STUCK = "stuck"
_ROLE, _SURVEY, _SAME, _BETWEEN = "role-", "survey-", "same", "between"
_COMMUNICATORS = "communicators-"
#: Largest difference of ranks that do the same with other pieces: what rounding and padding add.
_NEAR = 0.001


@dataclass(frozen=True)
class RankRole:
    """What one rank did in its dry run.

    Attributes:
        rank: Its number.
        world_size: Ranks of the job; 0 if it never created a process group.
        groups: The process groups that the job created, each a list of global ranks, in order.
        peers: Ranks with which it exchanged tensors point to point.
        digest: A number equal for ranks that ran the same operators with results of the same sizes.
        total: A number equal for ranks that ran the same operators with results of the same sizes, in any order.
        sums: Bytes of the results of each operator in all, without views, by its name.
        peak_bytes: Maximum number of allocated bytes on the virtual GPU; 0 without one.
    """

    rank: int
    world_size: int
    groups: list[list[int]]
    peers: list[int]
    digest: int
    total: int = 0
    sums: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0

    def does_as(self, other: RankRole) -> bool:
        """Returns whether another rank did the same.

        It also does if its bytes are in other pieces, such as the parts of parameters of a sharded optimizer: if the
        peaks, and the bytes of each operator, differ by less than a thousandth.
        """
        if self.digest == other.digest:
            return True
        if not self.peak_bytes or self.sums.keys() != other.sums.keys():
            return False
        apart = max((abs(size - other.sums[name]) for name, size in self.sums.items()), default=0)
        is_near = abs(self.peak_bytes - other.peak_bytes) <= _NEAR * self.peak_bytes
        return is_near and apart <= _NEAR * sum(self.sums.values())

    def write(self, spool: Path) -> None:
        """Writes the role into a spool folder.

        Raises:
            OSError: It cannot be written.
        """
        _write(spool, f"{_ROLE}{self.rank}", asdict(self))


@dataclass(frozen=True)
class StageSurvey:
    """What a rank has shown of its pipeline stages once each of them ran one micro-batch.

    Attributes:
        digest: A number equal for ranks that ran the same operators until then, in each stage for one micro-batch, and
            stored the same bytes.
        stored: The maximum number of micro-batches that the rank stores at a time, by its schedule.
    """

    digest: int
    stored: int

    def write(self, spool: Path, rank: int) -> None:
        """Writes the survey of a rank into a spool folder.

        Raises:
            OSError: It cannot be written.
        """
        _write(spool, f"{_SURVEY}{rank}", asdict(self))


def read_surveys(spool: Path) -> dict[int, StageSurvey]:
    """Returns the surveys written so far, by rank."""
    paths = (spool / FOLDER).glob(f"{_SURVEY}*")
    return {
        int(path.name.removeprefix(_SURVEY)): StageSurvey(**json.loads(path.read_text(encoding="utf-8")))
        for path in paths
    }


def _write(spool: Path, name: str, value: object) -> None:
    folder = spool / FOLDER
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    fresh = folder / f"new-{name}"
    with open_private(fresh, encoding="utf-8") as file:
        json.dump(value, file)
    fresh.replace(folder / name)


def read_role(spool: Path, rank: int) -> RankRole | None:
    """Returns a rank's role, or None if the rank left none."""
    try:
        return RankRole(**json.loads((spool / FOLDER / f"{_ROLE}{rank}").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_communicators(spool: Path, rank: int, used: Mapping[str, int]) -> None:
    """Writes the values of a rank's `Communicators` into a spool folder, whenever they change: a rank may be killed.

    Raises:
        OSError: They cannot be written.
    """
    _write(spool, f"{_COMMUNICATORS}{rank}", used)


def read_communicators(spool: Path) -> dict[str, dict[str, Any]]:
    """Returns the values of each dry-run rank's `Communicators`, by its number; those without any are left out.

    A rank that was ended before it was complete may not have used all of its communicators: each of its values is at
    least the largest of any rank.
    """
    paths = (spool / FOLDER).glob(f"{_COMMUNICATORS}*")
    used = {path.name.removeprefix(_COMMUNICATORS): _read(spool, path.name) for path in paths}
    most = {name: max(values[name] for values in used.values() if values) for name in next(iter(used.values()), {})}
    found: dict[str, dict[str, Any]] = {}
    for rank, values in sorted(used.items(), key=lambda one: int(one[0])):
        is_complete = (spool / FOLDER / f"{_ROLE}{rank}").exists()
        found[rank] = values if is_complete or values == most else {**most, "is_assumed": True}
    return {rank: values for rank, values in found.items() if values.get("count")}


def write_same(
    spool: Path, same: Mapping[int, Sequence[int]], between: Mapping[int, Mapping[str, object]] | None = None
) -> None:
    """Writes which ranks do the same as each rank that was dry-run, and which are between it and another.

    Args:
        spool: The spool folder.
        same: The ranks that do the same, by the rank that was dry-run.
        between: The values of its `Between`, likewise.

    Raises:
        OSError: It cannot be written.
    """
    _write(spool, _SAME, same)
    _write(spool, _BETWEEN, between or {})


def read_same(spool: Path) -> dict[str, list[int]]:
    """Returns the ranks that do the same as each that was dry-run, by its number; empty without such ranks."""
    return _read(spool, _SAME)


def read_between(spool: Path) -> dict[str, dict[str, Any]]:
    """Returns the values of the `Between` of each rank that was dry-run and has one, by its number."""
    return _read(spool, _BETWEEN)


def _read(spool: Path, name: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((spool / FOLDER / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found
