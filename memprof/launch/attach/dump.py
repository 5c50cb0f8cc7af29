"""What is alive in a running job now, as a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from memprof.launch.attach.session import Session
from memprof.machines.host_limits import HostLimit, nearest_limit
from memprof.trace.assemble.present import read_present
from memprof.trace.store import Trace


@dataclass(frozen=True)
class Dump:
    """What is alive in a process of a job.

    Attributes:
        pid: The process.
        rank: Its rank.
        pause_s: For how long its main thread was held up, in seconds.
        host: What is left of main memory under its tightest limit; None where the system does not tell.
        traces: A trace for each device, GPUs first.
    """

    pid: int
    rank: int
    pause_s: float
    host: HostLimit | None
    traces: tuple[Trace, ...]


def dump(session: Session) -> Dump:
    """Returns what is alive in a process.

    Args:
        session: An open attach.

    Raises:
        CannotAttachError: Its Python does not permit it, or other threads than the main one train.
        NoAnswerError: It ended, or did not answer in time.
    """
    session.check_threads(in_one=False)
    answer = session.ask("dump")
    pid = session.process.pid
    traces = tuple(Trace.of([one], Path(f"process {pid}"), None) for one in read_present(Path(answer["spool"])))
    return Dump(pid, int(answer["rank"]), float(answer["pause_s"]), nearest_limit(pid=pid), traces)
