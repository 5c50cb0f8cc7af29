"""What a search proposes for a device fits it with all that the allocator reserves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memprof.analysis.plans.basis import basis_of
from memprof.analysis.plans.suggest import suggest
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest, SearchResult
from memprof.trace.step import Step
from tests.clocks import Clock
from tests.recorder.recorded import record

SCRIPT = Path(__file__).resolve().parents[2] / "lab" / "benchmarks" / "jobs" / "searched.py"


def test_what_is_reserved_fits_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose tensors fit and whose segments do not is replaced by a slower one, unless only tensors count.

    The searches within smaller budgets share the time limit; plans of the first are known to the second.
    """
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

    clock, limits = Clock(), list[float]()

    def takes_its_time(step: Step, limited: SearchRequest, *more: Any) -> SearchResult:
        limits.append(limited.time_limit_s)
        clock.now_s += limited.time_limit_s
        return explore(step, replace(limited, time_limit_s=60.0 if len(limits) == 1 else 0.0), *more)

    monkeypatch.setattr("memprof.analysis.plans.suggest.time", clock)
    monkeypatch.setattr("memprof.analysis.plans.suggest.explore", takes_its_time)
    hurried = suggest(trace, basis, replace(request, counts_reserved=True))
    assert len(limits) > 1
    assert sum(limits) <= request.time_limit_s == hurried.answer.search_request.time_limit_s
    assert hurried.reserved[0] is not None
    assert hurried.reserved[0] <= request.budget_bytes
