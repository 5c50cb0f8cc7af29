"""What is alive in a running job now, as a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from memprof.launch.attach.session import Session
from memprof.trace.assemble.present import read_present
from memprof.trace.store import Trace


@dataclass(frozen=True)
class Dump:
    """What is alive in a job.

    Attributes:
        pid: The job's process.
        pause_s: For how long its main thread was held up, in seconds.
        traces: A trace for each device, GPUs first.
    """

    pid: int
    pause_s: float
    traces: tuple[Trace, ...]


def dump(pid: int, say: Callable[[str], None], wait_s: float) -> Dump:
    """Returns what is alive in a job.

    Args:
        pid: Its process.
        say: Prints what is waited for.
        wait_s: Longest wait for its main thread, in seconds.

    Raises:
        CannotAttachError: It may not be attached to.
        NoAnswerError: It ended, or did not answer in time.
    """
    with Session(pid, say, wait_s) as session:
        answer = session.ask("dump")
        tables = read_present(session.folder / "present")
    traces = tuple(Trace.of([one], Path(f"process {pid}"), None) for one in tables)
    return Dump(pid, float(answer["pause_s"]), traces)
