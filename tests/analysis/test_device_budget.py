"""What a search proposes for a device fits it with all that the allocator reserves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from memprof.analysis.plans.basis import basis_of
from memprof.analysis.plans.suggest import Suggestion, describe_least, suggest
from memprof.planners.search.request import SearchRequest
from memprof.trace.store import Trace
from memprof.units import format_bytes
from tests.recorder.recorded import record

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "lab" / "benchmarks" / "jobs" / "searched.py"


def within(sample: str, share: float, *, counts_reserved: bool = True) -> Suggestion:
    trace = Trace.open(ROOT / "sample_traces" / sample / "run.memprof")
    basis = basis_of(trace)
    budget = int(basis.peak_bytes * share)
    request = SearchRequest(budget, allow=("checkpoint",), counts_reserved=counts_reserved, is_checked=True)
    return suggest(trace, basis, request)


def test_what_is_reserved_fits_a_device(tmp_path: Path) -> None:
    """A plan whose tensors fit and whose segments do not is over the budget, unless only tensors count."""
    job = ("gpt", "--scale", "3", "--device", "cuda")
    trace = record(tmp_path, "--dry-run", "--device", "rtx4090", SCRIPT, *job).trace
    basis = basis_of(trace)
    request = SearchRequest(basis.peak_bytes * 7 // 10, allow=("checkpoint",))
    tensors = suggest(trace, basis, request)
    segments = suggest(trace, basis, replace(request, counts_reserved=True))
    for found in (tensors, segments):
        assert found.answer.best is not None
        assert found.answer.best.peak_bytes <= request.budget_bytes
        assert found.answer.search_request.budget_bytes == request.budget_bytes
    loose, tight = tensors.reserved[0], segments.reserved[0]
    assert loose is not None
    assert tight is not None
    assert tight <= request.budget_bytes < loose
    assert segments.plans[0].step_time_us >= tensors.plans[0].step_time_us
    within = request.budget_bytes
    assert all(0 < one.reserved_bytes <= within for one in segments.answer.fitting)
    over = [one for one in segments.answer.others if one.peak_bytes <= within]
    assert over
    assert all(one.reserved_bytes == segments.answer.search_request.needed(one) > within for one in over)


def test_little_is_recomputed_where_only_segments_exceed_a_device() -> None:
    """The peak fits: what frees a little of it at its moment is enough, and is not left out for what frees more."""
    answer = within("gpt-h200", 1.05).answer
    assert answer.best is not None
    assert answer.best.policies
    assert answer.recorded.peak_bytes < answer.search_request.budget_bytes < answer.recorded.reserved_bytes
    assert answer.best.step_time_us < 1.01 * answer.recorded.step_time_us


def test_what_would_fit_a_device_includes_segments() -> None:
    """Of plans far above the budget, too: the size that is named is one that a plan fits."""
    for share in (0.5, 0.7, 0.76):
        found = within("gpt-h200", share)
        least = found.answer.least
        assert found.answer.best is None
        assert least.reserved_bytes == found.answer.search_request.needed(least) > least.peak_bytes
        reserved = format_bytes(least.reserved_bytes)
        assert f"the allocator reserves {reserved}. Give at least {reserved}" in describe_least(found)


def test_nothing_is_reserved_for_a_job_on_the_processor() -> None:
    """A device as the budget leads to the same plans as its size."""
    counted, tensors = (within("gpt", 0.6, counts_reserved=counts).answer for counts in (True, False))
    assert counted.fitting == tensors.fitting
    assert not any(one.reserved_bytes for one in (*counted.fitting, *counted.others))
