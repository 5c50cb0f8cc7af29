"""What a search is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memprof.machines.budget import HostBudget
from memprof.planners.search.candidate import Candidate, SeenErrors
from memprof.policies.base import Policy
from memprof.policies.plan.several_steps import Refusals


@dataclass(frozen=True)
class SearchRequest:
    """Parameters of a search.

    Attributes:
        budget_bytes: Most bytes that may be allocated at once.
        allow: Names of allowed policies; empty for those tried by default.
        forbid: Names of forbidden policies.
        most_slowdown: Maximum slowdown, as a fraction of the recorded step time; None for any.
        world_size: Number of ranks.
        time_limit_s: Time after which the search stops with its best result.
        planner: Planner whose schedule determines the modules that run again; ``auto`` uses its own search.
        link_bytes_per_us: Bandwidth to the swap target, for planners that offload.
        most_host_bytes: Most bytes of pinned host memory that copies may take; None for any. Below 0 where the job
            itself takes more than the host has.
        host: The host's budget as given.
        host_used_bytes: Host memory of the job itself, of all its processes; 0 where unknown or without a limit.
        host_limit: The limit that counts, with its bytes, in words; "" without one.
        is_unified: Whether ``budget_bytes`` is for a plan's copies on the host, too; the job's own host memory is
            already taken off.
        counts_reserved: Whether the budget is a device's memory, in which what the allocator reserves must fit.
        room_bytes: What that budget leaves free of the device, for what the job may take beyond its tensors.
        measured: Plans that were run already, such as compiled ones, whose effect can only be measured.
        is_checked: Whether a plan is run, or dry-run, before it is trusted: then its predicted peak must fit the
            budget, not the upper end of its interval.
        learned: Prediction errors of plans that were tried.
        is_rough: Whether the result only says what to dry-run: modules are then chosen once, without refinement.
        impossible: Why policies that change kernels cannot be applied, as dry runs showed.
        frames: Policies that change kernels, as ``frame_of`` returns them, to choose modules for; None for any.
    """

    budget_bytes: int
    allow: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()
    most_slowdown: float | None = None
    world_size: int = 1
    time_limit_s: float = 60.0
    planner: str = "auto"
    link_bytes_per_us: float = 0.0
    most_host_bytes: int | None = None
    host: HostBudget = field(default_factory=HostBudget)
    host_used_bytes: int = 0
    host_limit: str = ""
    is_unified: bool = False
    counts_reserved: bool = False
    room_bytes: int = 0
    measured: tuple[tuple[Policy, ...], ...] = ()
    is_checked: bool = False
    learned: SeenErrors = field(default_factory=SeenErrors)
    is_rough: bool = False
    impossible: Refusals = field(default_factory=dict, hash=False)
    frames: frozenset[tuple[Policy, ...]] | None = None

    def needed(self, one: Candidate) -> int:
        """Returns the bytes a plan needs: the upper end of its interval, unless plans are checked, or more reserved."""
        predicted = one.peak_bytes if self.is_checked else one.interval.most_bytes
        on_host = one.host_bytes if self.is_unified else 0
        return max(predicted + self.learned.expected(one.policies), one.reserved_bytes) + on_host


@dataclass(frozen=True)
class ScheduleSummary:
    """A schedule of operators: what recompute of individual operators could reach.

    Attributes:
        planner: The planner that made it.
        status: How the search ended, one of planners.base.STATUSES.
        reason: One sentence that explains the status.
        peak_bytes: Its replayed peak; 0 where nothing fits.
        step_time_us: Its step time; 0 where nothing fits.
    """

    planner: str
    status: str
    reason: str
    peak_bytes: int
    step_time_us: float


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        search_request: The request.
        recorded: The recorded step.
        fitting: Plans within the budget and the slowdown limit, fastest first, but for a simpler one (`_fast_enough`).
        others: The other plans, closest to the budget first.
        refused: Inapplicable plans, with the reason.
        least: The plan that needs least.
        was_stopped: Whether the search stopped before it was complete.
        tried: Number of plans replayed.
        took_s: Duration of the search.
        was_interrupted: Whether Ctrl-C stopped it, rather than the deadline.
        schedule: The requested planner's schedule of the step's operators; None for ``auto``.
    """

    search_request: SearchRequest
    recorded: Candidate
    fitting: tuple[Candidate, ...]
    others: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]
    least: Candidate
    was_stopped: bool
    tried: int
    took_s: float
    was_interrupted: bool = False
    schedule: ScheduleSummary | None = None

    @property
    def best(self) -> Candidate | None:
        """The plan to take: the first that fits."""
        return self.fitting[0] if self.fitting else None


#: Makes the request from options that were validated before anything was recorded: called with the peak of the recorded
#: step, with what a device's budget leaves free of it (``machines.budget.Room``), and with further fields. It raises a
#: UsageError where the budget is not valid for the recording.
MakeSearchRequest = Callable[..., SearchRequest]
