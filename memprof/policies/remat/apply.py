"""Installs the rematerialisation runtime in a real job."""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import TYPE_CHECKING

from memprof.errors import PolicyError
from memprof.policies.remat.counters import Counter, FirstSteps, ProcessorCounter, counter_of
from memprof.policies.remat.memory import Memory
from memprof.policies.remat.mode import RematMode
from memprof.policies.remat.needs import Needs
from memprof.policies.remat.recomputation import Recomputation
from memprof.policies.remat.saved import Keys, SavedHooks
from memprof.policies.remat.transform import COMPILED, OVERLAP
from memprof.policies.remat.victims import Swapping
from memprof.policies.runtime.job import Job
from memprof.policies.runtime.job_traits import find_compiled, import_compiler
from memprof.policies.swap.packing import require_unhooked
from memprof.policies.swap.policy import DEFAULT_GBPS
from memprof.policies.swap.transfers import DiskCarrier, HostCarrier
from memprof.units import format_bytes

if TYPE_CHECKING:
    from memprof.policies.remat.policy import Remat


class Runtime:
    """The components of one budget; a process has one, even with several models."""

    def __init__(self, policy: Remat, job: Job) -> None:
        """Builds the components.

        Raises:
            PolicyError: The device's allocator has no counter, or the swap target is not available.
        """
        self.policy = policy
        self.users = 0
        self.counter: Counter = counter_of(job.device)
        self._carrier = _carrier(policy, job)
        swapping = None if self._carrier is None else Swapping(self._carrier, DEFAULT_GBPS[policy.swap] * 1000)
        self.memory = Memory(self.counter, policy.budget_bytes, policy.heuristic, swapping)
        if policy.budget_share:
            self.memory.peak = FirstSteps(self.counter, policy.budget_share)
        self.memory.on_thrash = self._warn
        self.memory.warn_factor = policy.warn_factor
        if policy.exceeds:
            self.memory.on_excess = self._warn_of_excess
        self.needs = Needs(self.counter, job.device)
        recomputation = Recomputation(self.memory)
        self.keys = Keys(self.memory, policy.recompute) if policy.recompute else None
        self.mode = RematMode(self.memory, self.needs, recomputation, self.keys)
        self.hooks = SavedHooks(self.memory, recomputation, self.keys)
        self._has_warned = self._has_warned_of_excess = False

    def begin(self) -> None:
        """Installs mode and hooks below those of the job."""
        self.needs.begin()
        self.hooks.slide_in()
        self.mode.slide_in()

    def end(self) -> None:
        """Removes them. Tensors that autograd already saved can still be restored."""
        self.mode.slide_out()
        self.hooks.slide_out()
        self.needs.end()
        if self.memory.peak is not None:
            self.memory.peak.stop()
        self.memory.stop()
        self.counter.close()

    def _warn(self) -> None:
        """Warns once when most of the time is spent on recomputation."""
        if self._has_warned:
            return
        self._has_warned = True
        memory = self.memory
        warnings.warn(
            f"remat: recomputation takes {memory.again_us / max(memory.first_us, 1.0):.1f} times as long as the first "
            f"runs, to stay within {format_bytes(memory.budget_bytes)}. Use a larger budget, a smaller batch or swap "
            "to reduce it.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _warn_of_excess(self, reason: str) -> None:
        if not self._has_warned_of_excess:
            self._has_warned_of_excess = True
            warnings.warn(reason, RuntimeWarning, stacklevel=2)


_runtime: Runtime | None = None


def start(policy: Remat) -> None:
    """Starts the allocator's count before the job creates its first tensor."""
    ProcessorCounter.begin_early()


def apply(job: Job, policy: Remat) -> None:
    """Installs the policy; several models of one process share a budget.

    Raises:
        PolicyError: The model is compiled or sharded, other hooks conflict, or another budget is
            active.
    """
    global _runtime  # noqa: PLW0603 - one budget per process
    _refuse(job)
    import_compiler()
    if _runtime is not None and _runtime.policy != policy:
        raise PolicyError("this process already has another budget for remat; use one budget for all its models.")
    runtime = _runtime or Runtime(policy, job)
    try:
        if runtime.keys is not None:
            runtime.keys.install(job)
        if _runtime is None:
            runtime.begin()
            _runtime = runtime
    except BaseException:
        if _runtime is None:
            if runtime.memory.peak is not None:
                runtime.memory.peak.stop()
            runtime.counter.close()
        raise
    runtime.users += 1
    job.on_undo(_leave)


def _leave() -> None:
    global _runtime  # noqa: PLW0603 - one budget per process
    if _runtime is not None:
        _runtime.users -= 1
        if not _runtime.users:
            _runtime.end()
            _runtime = None


def _refuse(job: Job) -> None:
    try:
        require_unhooked(job.model, [job.model])
    except PolicyError:
        raise PolicyError(OVERLAP) from None
    compiled = find_compiled(job)
    if compiled is not None:
        raise PolicyError(COMPILED.format(what=compiled or "the model"))
    if job.has_parts:
        raise PolicyError("remat needs a plain model; this one is sharded over ranks.")


def _carrier(policy: Remat, job: Job) -> HostCarrier | DiskCarrier | None:
    if not policy.swap:
        return None
    kind = job.device.type
    if policy.swap == "host":
        if kind != "cuda":
            raise PolicyError("remat cannot swap to host: this model is already in host memory; write swap = 'disk'.")
        return HostCarrier(job.device)
    if kind != "cpu":
        raise PolicyError(
            f"remat can only swap to disk from host memory, and this model is on {kind}; write swap = 'host'."
        )
    carrier = DiskCarrier(tempfile.gettempdir())
    job.on_undo(carrier.close)
    return carrier


def _leave_in_child() -> None:
    global _runtime  # noqa: PLW0603 - one budget per process
    if _runtime is not None:
        _runtime.mode.slide_out()
        _runtime.hooks.slide_out()
        _runtime = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)
