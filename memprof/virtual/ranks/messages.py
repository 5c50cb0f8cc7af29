"""Passes Python objects and small integers between dry-run ranks, through files."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from memprof.trace.files.private_file import FOLDER_MODE, open_private
from memprof.trace.files.rank_roles import ENDED, FOLDER, STUCK, WAITING
from memprof.virtual.ranks.role import Role

_POLL_S = 0.02
#: Of so many looks for a message, one also finds out whether any will come.
_POLLS = 10
#: Limit on the wait for another rank's message where no parent notices that none will come, in seconds.
_PATIENCE_S = 600.0


class Messages:
    """What this rank sends to others, and receives from them.

    A rank that waits for another leaves a mark, and the parent then starts the other, or lets it continue.
    """

    def __init__(self, spool: Path, role: Role, refuse: Callable[[str], NoReturn], *, is_given: bool) -> None:
        """Prepares the exchange; creates nothing yet.

        Args:
            spool: The recording's spool folder, which the ranks of one machine share.
            role: Contains this rank's number.
            refuse: Ends the job with a message.
            is_given: Whether the parent starts each rank, and notices when all wait for one another.
        """
        self._patience_s = math.inf if is_given else _PATIENCE_S
        self._folder = spool / FOLDER
        self._role = role
        self._refuse = refuse
        self._counts: Counter[str] = Counter()

    def send(self, kind: str, group: Sequence[int], source: int, target: int, value: Any) -> None:
        """Writes a message.

        Args:
            kind: The kind of call that sends: messages of different kinds are separate.
            group: Global ranks of the process group.
            source: Global rank that sends.
            target: Global rank that receives; -1 for all of the group.
            value: What is sent, which must be picklable.
        """
        path = self._path(kind, group, source, target)
        path.parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        with open_private(fresh, "xb") as file:
            pickle.dump(value, file)
        fresh.replace(path)

    def receive(self, kind: str, group: Sequence[int], source: int, target: int) -> Any:
        """Waits for a message, and returns what was sent; arguments are those of ``send``."""
        path = self._path(kind, group, source, target)
        path.parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
        if not path.exists():
            self._wait_for(path, source)
        with path.open("rb") as file:
            return pickle.load(file)  # noqa: S301 - written by a rank of this job a moment ago

    def _wait_for(self, path: Path, source: int) -> None:
        waiting, ended = path.parent / f"{WAITING}{self._role.rank}", path.parent / f"{ENDED}{source}"
        fresh = path.with_name(f"{waiting.name}.{os.getpid()}")
        with open_private(fresh, encoding="ascii") as file:
            file.write(str(source))
        fresh.replace(waiting)
        stuck = path.parent / STUCK
        limit, parent = time.monotonic() + self._patience_s, os.getppid()
        wanted, polls = str(path), itertools.count()
        while not os.path.exists(wanted):  # noqa: PTH110 - dozens of ranks wait, each fifty times a second
            if next(polls) % _POLLS:
                time.sleep(_POLL_S)
                continue
            was_left = os.getppid() != parent  # killed, it starts no other rank
            is_over = was_left or ended.exists() or stuck.exists() or time.monotonic() > limit
            if is_over and not path.exists():
                self._refuse(
                    f"rank {self._role.rank} waits for a message that rank {source} never sent: a dry run cannot "
                    "follow this exchange."
                )
            time.sleep(_POLL_S)
        waiting.unlink(missing_ok=True)

    def _path(self, kind: str, group: Sequence[int], source: int, target: int) -> Path:
        members = zlib.crc32(repr(tuple(group)).encode())
        name = f"{kind}-{members:08x}-{source}-{target}"
        self._counts[name] += 1
        return self._folder / f"{name}-{self._counts[name]}"
