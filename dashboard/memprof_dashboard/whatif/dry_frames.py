"""Steps under policies that change kernels: dry runs of the job by ``memprof predict``, beside the dashboard.

``predict`` runs a job only in the folder where this user recorded it, with unchanged files.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from memprof.errors import MemprofError, PolicyError

if TYPE_CHECKING:
    from memprof.analysis.plans.basis import Basis
    from memprof.policies.base import Policy
    from memprof.policies.plan.plan import Plan
    from memprof.trace.step import Step
    from memprof_dashboard.rank import Rank

_SEVERAL = "the recorded steps differ; memprof predict dry-runs all of them"
_UNDER_WAY = "a dry run of the job is under way"


class DryFrames:
    """The dry runs of a dashboard: one at a time, each once."""

    def __init__(self, *, may_run: bool) -> None:
        """Starts nothing yet."""
        self.may_run = may_run
        self._steps: dict[tuple[Rank, tuple[Policy, ...]], Future[Step]] = {}
        self._guard, self._one_at_a_time = threading.Lock(), threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    @property
    def finished(self) -> int:
        """Number of dry runs that have ended."""
        return sum(future.done() for future in list(self._steps.values()))

    @property
    def is_running(self) -> bool:
        """Whether one is under way."""
        return self.finished < len(self._steps)

    def basis(self, rank: Rank, basis: Basis, plan: Plan, *, waits: bool = False) -> tuple[Basis, str]:
        """Returns the steps to predict a plan from.

        Args:
            rank: The recording.
            basis: Its steps as recorded, maybe with dry runs of other plans.
            plan: The plan; a dry run under its policies that change kernels is started if there was none.
            waits: Wait for it.

        Returns:
            The steps, and why the plan is estimated from them, a sentence; "" where it need not be.
        """
        from memprof.analysis.plans.frames import as_recorded
        from memprof.policies.plan.several_steps import frame_of

        frame = frame_of(plan.policies)
        if not frame or not self.may_run or frame in basis.dry_steps:
            return basis, ""
        why = _SEVERAL if basis.others else _UNDER_WAY
        future = None if basis.others else self._start(rank, frame)
        if future is not None and (waits or future.done()):
            try:
                step = future.result()
            except MemprofError as error:
                why = str(error)
            else:
                known = as_recorded(step, basis.step, step.ops.duration_us, step.duration_us)
                return replace(basis, dry_steps={**basis.dry_steps, frame: (known,)}), ""
        described = ", ".join(policy.describe() for policy in frame)
        return basis, f"{described} is estimated: {why.rstrip('.')}."

    def close(self) -> None:
        """Ends the dry run that is under way."""
        self.may_run = False
        if (process := self._process) is not None:
            process.terminate()

    def _start(self, rank: Rank, frame: tuple[Policy, ...]) -> Future[Step]:
        with self._guard:
            known = self._steps.get((rank, frame))
            if known is None:
                self._steps[rank, frame] = known = Future()
                threading.Thread(target=self._fill, args=(known, rank, frame), daemon=True).start()
            return known

    def _fill(self, future: Future[Step], rank: Rank, frame: tuple[Policy, ...]) -> None:
        try:
            with self._one_at_a_time, tempfile.TemporaryDirectory(prefix="memprof-dashboard-") as folder:
                future.set_result(self._dry_run(rank, frame, Path(folder)))
        except MemprofError as error:
            future.set_exception(error)
        except OSError as error:
            future.set_exception(PolicyError(f"no dry run can be started: {error}"))

    def _dry_run(self, rank: Rank, frame: tuple[Policy, ...], folder: Path) -> Step:
        if not self.may_run:
            raise PolicyError("the dashboard has ended")
        from memprof.policies.plan.plan import Plan
        from memprof.policies.plan.plan_file import format_plan
        from memprof.trace.store import Trace

        plan, output = folder / "plan.toml", folder / "predicted.memprof"
        plan.write_text(format_plan(Plan(frame)), encoding="utf-8")
        words = ["predict", str(Path(rank.trace.path).resolve()), "--plan", str(plan), "-o", str(output), "--json"]
        words += ["--rank", str(rank.trace.rank)] if len(rank.trace.ranks) > 1 else []
        command = [sys.executable, "-m", "memprof", *words]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True) as process:
            self._process = process
            told, errors = process.communicate()
            self._process = None
        if process.returncode:
            raise PolicyError((errors.strip().splitlines() or ["memprof predict failed"])[-1].removeprefix("memprof: "))
        found = json.loads(told)
        if found["how"] != "dry-run":
            raise PolicyError(next((text for text in found["warnings"] if "not dry-run" in text), "it was not dry-run"))
        return Trace.open(output).fullest_step(is_whole=True)
