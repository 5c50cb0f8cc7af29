"""What a search proposes for a device fits it with all that the allocator reserves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from memprof.analysis.plans.basis import basis_of
from memprof.analysis.plans.suggest import suggest
from memprof.planners.search.request import SearchRequest
from tests.recorder.recorded import record

SCRIPT = Path(__file__).resolve().parents[2] / "lab" / "benchmarks" / "jobs" / "searched.py"


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
