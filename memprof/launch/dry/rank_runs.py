"""Dry-runs the ranks of a distributed job: one process for each distinct role, a few at a time.

As many run as there are processors, those that others wait for first. A rank that waits for a message of another takes
no processor. It may be released by one that is no longer needed: ranks that were only started to send messages are
stopped once these are sent, and ended when all others have ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import psutil

from memprof.launch.dry.rank_processes import ForkedRanks, FreshRanks, RankProcess, start_ranks
from memprof.launch.dry.rank_roles import Grid, find_roles
from memprof.launch.outcome.plan_marks import mark_refused
from memprof.launch.parent.relay import SignalRelay
from memprof.trace.files.private_file import FOLDER_MODE
from memprof.trace.files.rank_roles import (
    ENDED,
    FOLDER,
    STUCK,
    WAITING,
    RankRole,
    StageSurvey,
    read_role,
    read_surveys,
    write_same,
)


@dataclass(frozen=True)
class Turns:
    """What ranks do until the next message or end.

    Attributes:
        going: Started ranks that run, or wait for a message; others are stopped.
        starting: Ranks to start.
        is_done: Whether no rank is needed any more.
        is_stuck: Whether all needed ranks wait for one another.
    """

    going: frozenset[int]
    starting: tuple[int, ...] = ()
    is_done: bool = False
    is_stuck: bool = False


def find_turns(
    alive: Collection[int],
    ended: Collection[int],
    waiting: Mapping[int, int],
    wanted: Sequence[int],
    most: int,
    world_size: int = 0,
) -> Turns:
    """Returns which ranks run next.

    Args:
        alive: Ranks that were started and have not ended.
        ended: Ranks that have ended.
        waiting: Ranks that wait for a message, each with the rank that sends it.
        wanted: Ranks to be dry-run, in order; they are known once rank 0 has ended.
        most: Maximum number of ranks that run at a time.
        world_size: Ranks of the job; those beyond are not started in advance.
    """
    needed: dict[int, None] = {}
    awaited: list[int] = []
    open_ranks = [0, *wanted]
    while open_ranks:
        rank = open_ranks.pop(0)
        if rank in needed or rank in ended:
            continue
        needed[rank] = None
        if rank in waiting:
            awaited.append(waiting[rank])
            open_ranks.append(waiting[rank])
    # Most will be wanted, the last one certainly.
    likely = sorted(alive, key=lambda rank: (rank != world_size - 1, rank))
    others = [] if 0 in ended else [*_next_in_line(waiting, world_size), *likely]
    order = dict.fromkeys((*awaited, *needed, *others))
    turns = [rank for rank in order if rank not in waiting and rank not in ended][:most]
    return Turns(
        going=frozenset(rank for rank in alive if rank in turns or rank in waiting),
        starting=tuple(rank for rank in turns if rank not in alive),
        is_done=not needed,
        is_stuck=bool(needed) and not turns,
    )


def _next_in_line(waiting: Mapping[int, int], world_size: int) -> list[int]:
    """Returns ranks that will be waited for next, where ranks wait for one another in a line, as stages do at first."""
    found = []
    for rank, awaited in waiting.items():
        step = awaited - rank
        if waiting.get(rank - step) == rank and 0 <= awaited + step < world_size:
            found.append(awaited + step)
    return found


#: Maximum number of ranks that are dry-run.
MOST_RUNS = 32
_POLL_S = 0.05
#: How long all ranks must wait for one another before they end, in seconds: a message may be about to be read.
_STUCK_S = 5.0
#: Ranks that use less than this much processor time, in seconds, during the second number of seconds are idle.
_LEAST_WORK_S, _IDLE_S = 0.1, 10.0


def rank_environment(rank: int, ranks: int, nodes: int) -> dict[str, str]:
    """Returns the variables that torchrun sets for a rank."""
    on_node = ranks // nodes
    numbers = {
        **dict.fromkeys(("RANK", "ROLE_RANK"), rank),
        "LOCAL_RANK": rank % on_node,
        "GROUP_RANK": rank // on_node,
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), ranks),
        "LOCAL_WORLD_SIZE": on_node,
        "GROUP_WORLD_SIZE": nodes,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "MASTER_PORT": 29500,
    }
    texts = {"MASTER_ADDR": "localhost", "TORCHELASTIC_RUN_ID": "none", "ROLE_NAME": "default"}
    return {**texts, **{name: str(number) for name, number in numbers.items()}}


class RankRuns:
    """The processes of a job's ranks."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], spool: Path, ranks: int, nodes: int, name: str
    ) -> None:
        """Starts nothing yet.

        Args:
            command: Command line of each rank.
            environment: Their environment, without the variables that differ between ranks.
            spool: The recording's spool folder.
            ranks: Ranks of the job.
            nodes: Machines, each with the same number of ranks.
            name: The job's name, for messages.
        """
        self._command = list(command)
        self._environment = {"OMP_NUM_THREADS": "1", **environment}
        self._spool = spool
        self._folder = spool / FOLDER
        self._ranks, self._nodes, self._name = ranks, nodes, name
        self._running: dict[int, RankProcess] = {}
        self._ended: set[int] = set()
        self._roles: dict[int, RankRole] = {}
        self._surveys: dict[int, StageSurvey] = {}
        self._has_new_roles = False
        self._wanted: list[int] = []
        self._surveyed: list[int] = []
        self._stopped: set[int] = set()
        self._stuck_since = self._progress_at = time.monotonic()
        self._used_s, self._may_stop = 0.0, True
        self._most_running = max(1, len(os.sched_getaffinity(0)))

    def run(self, relay: SignalRelay, stdout: int | None, stderr: int | None) -> int:
        """Dry-runs ranks until all roles are known; returns the exit status of the first that failed, else 0.

        Args:
            relay: Passes signals on to the ranks.
            stdout: File descriptor for the output of rank 0; None for this process's own. Others' output is discarded.
            stderr: The same for errors. Those of another rank are shown if it fails.
        """
        self._folder.mkdir(mode=FOLDER_MODE)
        processes = start_ranks(self._command, self._environment, stdout, stderr)
        try:
            self._start(0, processes)
            while True:
                relay.wait(_POLL_S, self._signal)
                status = self._reap(stderr)
                if status or not self._find_wanted():
                    return status
                waiting = self._waiting()
                wanted = [*self._wanted, *(rank for rank in self._surveyed if rank not in self._surveys)]
                turns = find_turns(self._running, self._ended, waiting, wanted, self._most_running, self._ranks)
                if turns.is_done:
                    others = [process.pid for process in self._running.values()]
                    self._end()
                    for pid in others:
                        shutil.rmtree(self._spool / f"process-{pid}", ignore_errors=True)
                    return 0
                now = time.monotonic()
                if not turns.is_stuck:
                    self._stuck_since = now
                elif now - self._stuck_since > _STUCK_S:
                    (self._folder / STUCK).touch()
                self._note_progress(turns.going - waiting.keys())
                self._take_turns(turns.going if self._may_stop else frozenset(self._running))
                for rank in turns.starting:
                    self._start(rank, processes)
        finally:
            self._end()
            processes.close()

    def _find_wanted(self) -> bool:
        """Updates which ranks must be run; returns False if the job does not have the requested ranks."""
        if 0 not in self._ended:
            return True
        surveys = read_surveys(self._spool)
        if self._has_new_roles or len(surveys) > len(self._surveys):
            self._has_new_roles = False
            self._surveys = surveys
            if not self._is_distributed():
                return False
            grid = Grid.of(self._ranks, self._roles[0].groups)
            roles = find_roles(grid, self._roles, MOST_RUNS, surveys)
            write_same(self._spool, roles.same, roles.between)
            self._wanted, self._surveyed = roles.wanted, roles.surveyed
        return True

    def _waiting(self) -> dict[int, int]:
        """Returns the ranks that wait for a message, each with the rank that sends it."""
        found = {}
        for rank in self._running:
            with contextlib.suppress(OSError, ValueError):  # it waits no longer, or has not written the number yet
                found[rank] = int((self._folder / f"{WAITING}{rank}").read_text(encoding="ascii"))
        return found

    def _note_progress(self, busy: Collection[int]) -> None:
        """Lets all ranks run from now on where those that may use no processor: a stopped one may hold their lock."""
        used_s = 0.0
        for pid in filter(None, (self._running[rank].pid for rank in busy)):
            with contextlib.suppress(psutil.Error):  # it has ended
                used_s += sum(psutil.Process(pid).cpu_times()[:2])
        now = time.monotonic()
        if not self._stopped or abs(used_s - self._used_s) > _LEAST_WORK_S:
            self._used_s, self._progress_at = used_s, now
        self._may_stop = self._may_stop and now - self._progress_at < _IDLE_S

    def _take_turns(self, going: Collection[int]) -> None:
        for rank, process in self._running.items():
            if process.pid and (rank in self._stopped) == (rank in going):
                process.send_signal(signal.SIGCONT if rank in going else signal.SIGSTOP)
                self._stopped ^= {rank}

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGCONT):
            self._signal(number)
        for process in self._running.values():
            process.wait()
        self._running.clear()

    def _is_distributed(self) -> bool:
        """Returns whether rank 0 created a group of all ranks; if not, the reason is left for the parent to print."""
        made = self._roles[0].world_size if 0 in self._roles else 0
        if made == self._ranks:
            return True
        sentence = f"{self._name} created a process group of {made:,} ranks, not {self._ranks:,}: use --ranks {made}."
        if not made:
            sentence = (
                f"{self._name} never called torch.distributed.init_process_group, so it has no ranks. --ranks is for "
                f"distributed scripts; for others, simulate ranks with --shard ddp:{self._ranks}."
            )
        mark_refused(self._spool, sentence)
        return False

    def _start(self, rank: int, processes: FreshRanks | ForkedRanks) -> None:
        variables = rank_environment(rank, self._ranks, self._nodes)
        self._running[rank] = processes.start(rank, variables, self._errors(rank) if rank else None)

    def _errors(self, rank: int) -> Path:
        return self._folder / f"errors-{rank}"

    def _reap(self, stderr: int | None) -> int:
        """Reads the roles of ranks that have ended; returns the status of one that failed, or 0."""
        for rank, process in list(self._running.items()):
            status = process.poll()
            if status is None:
                continue
            del self._running[rank]
            self._ended.add(rank)
            self._has_new_roles = True
            if (role := read_role(self._spool, rank)) is not None:
                self._roles[rank] = role
            (self._folder / f"{ENDED}{rank}").touch()
            if status:
                if rank and self._errors(rank).exists():
                    with open(self._errors(rank), "rb") as errors, _open_errors(stderr) as shown:
                        shown.write(f"rank {rank}:\n".encode())
                        shutil.copyfileobj(errors, shown)
                return status
        return 0

    def _signal(self, number: int) -> None:
        for process in self._running.values():
            process.send_signal(number)


@contextlib.contextmanager
def _open_errors(descriptor: int | None) -> Iterator[BinaryIO]:
    """Opens the job's standard error for writing; this process's own stream stays open."""
    sys.stderr.flush()
    with open(2 if descriptor is None else descriptor, "wb", closefd=False) as stream:
        yield stream
