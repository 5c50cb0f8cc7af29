"""Dry runs of one job under plans: forked from a process that has imported torch once, at most two at a time."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from memprof.errors import MemprofError
from memprof.launch.dry.apart import SCRATCH
from memprof.launch.dry.dry_job import check_plan
from memprof.launch.dry.dry_outcome import DryOutcome, EndedError, outcome_of
from memprof.launch.dry.rank_processes import ForkedRanks, FreshRanks, RankProcess, start_ranks
from memprof.launch.parent.job_process import recording_environment, stand_in_for_tools
from memprof.launch.parent.recorded_job import Begun, begin_recording, finish_recording
from memprof.launch.parent.relay import ENDING, SignalRelay
from memprof.launch.parent.settings import DryWindow, Settings
from memprof.launch.parent.target import CannotStartError, Target
from memprof.launch.torch_versions import is_read_at_import
from memprof.policies.plan.plan import Plan
from memprof.units import format_bytes

#: Dry runs at a time, where there are as many cores.
_MOST_AT_ONCE = 2
#: Bytes that all of them may hold in host memory at once.
MOST_BYTES = 4 << 30
#: Appended if an isolated job failed: it may have needed files or network access that isolation denies.
_WHILE_APART = "(It had no network; isolate = false under [tool.memprof.dry_run] in pyproject.toml allows it.)"
_POLL_S = 0.02
#: Interval between two looks at their memory, and the time that a process has to end itself, in seconds.
_LOOK_S, _GRACE_S = 0.5, 2.0


@dataclass(frozen=True)
class DryRequest:
    """A dry run to make.

    Attributes:
        plan: The plan to apply; None for the unmodified job.
        keep: Path for the recording; None to discard it.
    """

    plan: Plan | None
    keep: Path | None = None


#: Makes dry runs of a job; returns the outcome of each, in their order.
DryRuns = Callable[[Sequence[DryRequest]], Sequence[DryOutcome]]


@dataclass
class _Running:
    """A dry run that has started."""

    number: int
    begun: Begun
    process: RankProcess
    folder: Path
    keep: Path | None
    reason: str = ""
    ended_at: float = math.inf


class JobServer:
    """Runs a job on tensors without memory, under one plan after another. The job's output is discarded.

    Use it as a context manager from the main thread. The process that forks starts with `prepare` or the first dry run.
    """

    def __init__(
        self,
        target: Target,
        window: DryWindow,
        device: str = "",
        *,
        apart: bool = False,
        read_values: str = "",
        threads: int = 0,
    ) -> None:
        """Starts nothing yet.

        Args:
            target: The job.
            window: Steps to skip, and to record.
            device: The simulated device; "" for the CPU.
            apart: Isolate the job: writes in this folder are redirected, and it has no network (``command_apart``).
            read_values: Values of a recording of the job (``read_values_of``). Where it fails with them, as it may
                under a plan that changes what is read, it is run with placeholders.
            threads: That share an operator on the CPU: kernels' workspaces depend on them. 0 for as many as here.
        """
        self._read_values = read_values
        self._target, self._window, self._device, self._apart = target, window, device, apart
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._processes: FreshRanks | ForkedRanks | None = None
        self._inherited = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
        self._environment: Mapping[str, str] = {}
        self._count = 0

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the process that forks, and removes what was written."""
        if self._processes is not None:
            self._processes.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def run(self, requests: Sequence[DryRequest], deadline: float = math.inf) -> list[DryOutcome]:
        """Makes dry runs, at most two at a time.

        Args:
            requests: What to run.
            deadline: ``time.monotonic`` value at which those that still run are ended.

        Returns:
            The outcome of each, in their order.

        Raises:
            EndedError: A signal that asks the whole command to end arrived meanwhile.
        """
        outcomes: dict[int, DryOutcome] = {}
        waiting = []
        for number, request in enumerate(requests):
            try:
                check_plan(request.plan)
                waiting.append((number, request))
            except CannotStartError as error:
                outcomes[number] = DryOutcome(None, str(error), was_started=False)
        if waiting and (reason := self.prepare()):
            return [DryOutcome(None, reason, was_started=False) for _ in requests]
        with contextlib.ExitStack() as stack:
            try:
                relay = stack.enter_context(SignalRelay())
            except OSError as error:
                reason = f"no process can be started ({error.strerror or error})."
                return [DryOutcome(None, reason, was_started=False) for _ in requests]
            self._run_all(list(waiting), outcomes, relay, deadline)
            failed = [one for one in waiting if outcomes[one[0]].peak_bytes is None and outcomes[one[0]].was_started]
            if failed and self._read_values:
                with_values, self._read_values = self._read_values, ""
                again: dict[int, DryOutcome] = {}
                self._run_all(failed, again, relay, deadline)
                outcomes |= {number: one for number, one in again.items() if one.peak_bytes is not None}
                self._read_values = with_values
        return [outcomes[number] for number in range(len(requests))]

    def prepare(self) -> str:
        """Starts the process that forks, which imports torch meanwhile; returns why it cannot, a sentence."""
        if self._processes is not None:
            return ""
        try:
            self._scratch = tempfile.TemporaryDirectory(prefix="memprof-dry-")
        except OSError as error:
            why = error.strerror or error
            return f"a dry run needs a temporary folder, and none can be written ({why}): set TMPDIR."
        settings = self._settings(DryRequest(None), Path(self._scratch.name))
        self._environment = recording_environment(self._inherited, Path(self._scratch.name), settings)
        try:
            with open(os.devnull, "wb") as nothing:
                output = nothing.fileno()
                self._processes = start_ranks(self._target.arguments, self._environment, output, output)
        except OSError as error:
            return f"{self._target.name} cannot be started: {error.strerror or error}."
        return ""

    def _run_all(
        self,
        waiting: list[tuple[int, DryRequest]],
        outcomes: dict[int, DryOutcome],
        relay: SignalRelay,
        deadline: float,
    ) -> None:
        most = min(_MOST_AT_ONCE, len(os.sched_getaffinity(0)))
        running: list[_Running] = []
        looked_at = time.monotonic()
        try:
            while waiting or running:
                now = time.monotonic()
                while waiting and len(running) < most:
                    number, request = waiting.pop(0)
                    if now >= deadline:
                        outcomes[number] = DryOutcome(
                            None, "no time is left for its dry run (--time-limit).", was_started=False
                        )
                        continue
                    started = self._start(number, request)
                    if isinstance(started, _Running):
                        running.append(started)
                    else:
                        outcomes[number] = started
                relay.wait(_POLL_S, lambda _: None)
                if ending := sorted(relay.arrived & ENDING):
                    raise EndedError(ending[0])
                if now - looked_at > _LOOK_S:
                    looked_at = now
                    _end_largest(running, now)
                for one in list(running):
                    if now >= deadline and not one.reason:
                        one.reason = "its dry run did not end in time."
                    if one.reason and math.isinf(one.ended_at):
                        one.ended_at = now
                        _end(one, signal.SIGTERM)
                    elif now - one.ended_at > _GRACE_S:
                        _end(one, signal.SIGKILL)
                    status = one.process.poll()
                    if status is not None:
                        running.remove(one)
                        outcomes[one.number] = self._finish(one, status)
        finally:
            for one in running:
                _end(one, signal.SIGKILL)
                one.process.wait()
                one.begun.abandon()

    def _settings(self, request: DryRequest, folder: Path) -> Settings:
        return Settings(
            output=folder / "dry.memprof",  # not in the current folder, whose files may be discarded
            force=True,
            skip=self._window.skip,
            steps=self._window.steps,
            stop=True,
            dry_run=True,
            device=self._device,
            plan=request.plan,
            read_values=self._read_values,
        )

    def _start(self, number: int, request: DryRequest) -> _Running | DryOutcome:
        assert self._scratch is not None  # the server has started
        assert self._processes is not None
        self._count += 1
        folder = Path(self._scratch.name, str(self._count))
        begun = None
        try:
            folder.mkdir(mode=0o700)
            begun = begin_recording(self._target, self._settings(request, folder))
            spool = begun.spool.resolve()
            environment = recording_environment(self._inherited, spool, begun.settings)
            environment = stand_in_for_tools(environment, spool, self._device)
            if self._apart:
                environment[SCRATCH] = str(folder / "apart")
                Path(environment[SCRATCH]).mkdir(mode=0o700)
            changed = {name: text for name, text in environment.items() if self._environment.get(name) != text}
            processes = self._processes
            if isinstance(processes, ForkedRanks) and any(map(is_read_at_import, changed)):
                processes = processes.fresh
            process = processes.start(self._count, changed, folder / "errors")
            return _Running(number, begun, process, folder, request.keep)
        except (OSError, MemprofError) as error:
            if begun is not None:
                begun.abandon()
            return DryOutcome(None, f"{self._target.name} cannot be dry-run: {error}", was_started=False)

    def _finish(self, one: _Running, status: int) -> DryOutcome:
        if one.reason:
            one.begun.abandon()
            return DryOutcome(None, one.reason)
        errors = one.folder / "errors"
        done = finish_recording(one.begun, status)
        text = errors.read_text(encoding="utf-8", errors="replace") if errors.exists() else ""
        outcome = outcome_of(done, text)
        if one.keep is not None and done.output.is_file():
            shutil.move(done.output, one.keep)
        if self._apart and done.returncode and not done.refusal:
            return replace(outcome, reason=f"{outcome.reason} {_WHILE_APART}")
        return outcome


def _end_largest(running: Sequence[_Running], now: float) -> None:
    """Ends the dry run that holds the most host memory if all together hold too much."""
    held = {one.number: _held_bytes(one.process.pid) for one in running if not one.reason}
    if sum(held.values()) <= MOST_BYTES:
        return
    largest = max((one for one in running if one.number in held), key=lambda one: held[one.number])
    largest.reason = (
        f"its dry run held {format_bytes(held[largest.number])} of host memory; dry runs together may hold "
        f"{format_bytes(MOST_BYTES)}."
    )


def _held_bytes(pid: int) -> int:
    """Returns the resident bytes of a process and its children; 0 where it has ended."""
    if not pid:
        return 0
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += each.memory_info().rss
    return total


def _end(one: _Running, number: int) -> None:
    """Sends a signal to a dry run's processes."""
    if one.process.pid:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(one.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.send_signal(number)
    one.process.send_signal(number)


def dry_run(
    target: Target,
    plan: Plan | None,
    window: DryWindow,
    device: str = "",
    keep: Path | None = None,
    *,
    apart: bool = False,
) -> DryOutcome:
    """Runs a job on tensors without memory and returns its peak. The job's output is discarded.

    Args:
        target: The job.
        plan: The plan to apply; None for the unmodified job.
        window: Steps to skip, and to record.
        device: The simulated device; "" for the CPU.
        keep: Path for the recording; None to discard it.
        apart: Isolate the job: writes in this folder are redirected, and it has no network (``command_apart``).

    Raises:
        EndedError: A signal that asks the whole command to end arrived during the run.
    """
    with JobServer(target, window, device, apart=apart) as server:
        return server.run([DryRequest(plan, keep)])[0]
