"""Does the suggested plan make a job fit that runs out of memory?"""

from __future__ import annotations

from dataclasses import dataclass

from lab.gpu.runs import Job, JobError, record, side_by_side, train
from lab.gpu.section import Found, Place
from memprof.analysis.plans.basis import basis_of, link_of
from memprof.analysis.plans.suggest import describe_least, suggest
from memprof.planners.search.request import SearchRequest
from memprof.policies.plan.plan_file import write_plan
from memprof.trace.store import Trace
from memprof.units import format_bytes
from tests.devices import device_peak

TITLE = "Suggested plans: what ran out of memory fits"
HOW = (
    "The job is recorded without a limit. Under a limit on what the process may reserve, a share of its peak of "
    "allocated bytes, it runs out of memory. The fastest plan under which the allocator, as modelled, reserves no more "
    "than the limit is searched for, and the job run under plan and limit."
)
COLUMNS = ("model", "policies", "limit", "as it is", "plan", "predicted", "measured", "reserved", "ms as it is", "ms")
_SEARCH_S = 8.0


@dataclass(frozen=True)
class Case:
    """One model, how far below its peak it has to fit, and what may be used for that."""

    model: str
    share: float
    allow: tuple[str, ...] = ()

    @property
    def policies(self) -> str:
        """What may be used, in words."""
        return ", ".join(self.allow) or "any"


CASES = (Case("gpt", 0.65), Case("gpt", 0.7, ("checkpoint", "loss")), Case("unet", 0.7, ("checkpoint", "swap")))
REHEARSED = (Case("gpt", 0.95, ("checkpoint", "loss")),)


def measure(place: Place, found: Found) -> None:
    """Tries every case."""
    cases = REHEARSED if place.is_rehearsal else CASES
    models = sorted({case.model for case in cases})
    bases = dict(side_by_side(place, found, [(m, m) for m in models], lambda model: _base(place, model)))
    items = [(f"{case.model}, {case.policies}", case) for case in cases if case.model in bases]
    fits = 0
    for case, row in side_by_side(place, found, items, lambda case: _try(place, case, *bases[case.model])):
        fits += row["fits"]
        limit, *sizes = (format_bytes(row[f"{name}_bytes"]) for name in ("limit", "predicted", "measured"))
        as_it_is = "out of memory" if row["ran_out"] else f"peak {format_bytes(row['base_bytes'])}"
        reserved = format_bytes(row["reserved_bytes"]) if row["reserved_bytes"] else ""
        times = (f"{row[name] / 1e3:.1f}" for name in ("base_us", "step_us"))
        cells = (case.model, case.policies, limit, as_it_is, row["plan"], *sizes, reserved, *times)
        found.add(cells, **row)
    text = f"out of memory as it is, and within the limit under its plan: {fits} of {len(cases)}"
    found.bar(text, fits == len(cases))


def _base(place: Place, model: str) -> tuple[Trace, int, float]:
    """Returns the plain recording, its peak as the allocator has it, and the time of a step."""
    output = place.folder("recordings") / f"suggest-{model}.memprof"
    trained = record(place, Job(model), output)
    trace = Trace.open(output)
    peak = device_peak(trace.steady_step(), "cpu") if place.is_rehearsal else trained.peak("allocated_bytes")
    return trace, peak, trained.step_us()


def _try(place: Place, case: Case, base: Trace, peak_bytes: int, base_us: float) -> dict[str, object]:
    limit = int(case.share * peak_bytes)
    job = Job(case.model, () if place.is_rehearsal else ("--limit-bytes", str(limit)))
    ran_out = not place.is_rehearsal and _runs_out(place, job)
    search_request = SearchRequest(
        limit,
        allow=case.allow,
        time_limit_s=_SEARCH_S,
        link_bytes_per_us=link_of(base),
        counts_reserved=not place.is_rehearsal,
    )
    answer = suggest(base, basis_of(base), search_request)
    best = answer.answer.best
    if best is None:
        raise RuntimeError(describe_least(answer))
    name = f"suggest-{case.model}-{case.policies.replace(', ', '-')}"
    path = place.folder("predictions") / f"{name}.toml"
    write_plan(path, answer.predicted(best))
    output = place.folder("recordings") / f"{name}.memprof"
    parts = 1
    for policy in best.policies:
        parts *= getattr(policy, "micro_batches", 1)
    trained = record(place, job, output, plan=path)
    if place.is_rehearsal:
        measured, reserved = device_peak(Trace.open(output).steady_step(), "cpu"), 0
    else:
        measured, reserved = (trained.peak(counter, parts) for counter in ("allocated_bytes", "reserved_bytes"))
    return {
        "limit_bytes": limit,
        "base_bytes": peak_bytes,
        "ran_out": ran_out,
        "plan": best.plan.describe(),
        "predicted_bytes": best.peak_bytes,
        "measured_bytes": measured,
        "reserved_bytes": reserved,
        "base_us": base_us,
        "step_us": trained.step_us(parts),
        "fits": measured <= limit and reserved <= limit and (ran_out or place.is_rehearsal),
    }


def _runs_out(place: Place, job: Job) -> bool:
    """Runs a job without a plan; returns whether it ran out of memory.

    Raises:
        JobError: It ended for another reason.
    """
    try:
        train(place, job)
    except JobError as error:
        if "out of memory" not in error.said:
            raise
        return True
    return False
