"""Everything that reads a recording, as functions of one."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

from memprof.analysis.allocator.allocator_report import allocator_to_json, build_allocator_report
from memprof.analysis.allocator.static_report import build_static_report, static_to_json
from memprof.analysis.diff.comparison import compare
from memprof.analysis.diff.gates import parse_gate
from memprof.analysis.diff.summary import summarise, summary_to_json
from memprof.analysis.export.scrub import scrubbed
from memprof.analysis.export.stacks_export import export_stacks
from memprof.analysis.export.timeline_export import export_timeline
from memprof.analysis.out_of_memory.post_mortem import examine
from memprof.analysis.plans.basis import basis_of
from memprof.analysis.plans.predict import forecast, predicted_trace
from memprof.analysis.ranks.rank_report import compare_ranks, job_notes, read_curves
from memprof.analysis.ranks.stragglers import find_stragglers
from memprof.analysis.report.report import build_report
from memprof.analysis.report.report_json import report_to_json
from memprof.cli.page import Page
from memprof.cli.pages.diff.diff_data import diff_to_json
from memprof.cli.pages.report_page import fill_page
from memprof.policies.plan.plan_file import parse_plan
from memprof.replay.history import History
from memprof.trace.schema import TABLES
from memprof.trace.store import Trace
from memprof_dashboard.export_page.export import export_html
from tests.analysis.plain_snapshot import exported

_PLANS = (
    "[checkpoint]\nmodules = ['*']\n",
    "[precision]\ndtype = 'bf16'\n",
    "[accumulate]\nmicro_batches = 2\n",
    "[swap]\nmodules = ['.']\n",
    "[shard]\nstage = 3\nranks = 4\n",
    "[optimizer]\nstate = '8bit'\n",
    "[loss]\nchunks = 4\n",
    "[compress]\nmodules = ['.']\n",
)


def _predicting(plan: str) -> Callable[[Trace], Any]:
    def predict(trace: Trace) -> Any:
        return predicted_trace(forecast(trace, parse_plan(plan)))

    return predict


def _page(trace: Trace) -> str:
    page = Page.for_stdout()
    fill_page(page, build_report(trace), "run.memprof", None, None)
    return page.render()


def _timeline(trace: Trace) -> bytes:
    file = io.BytesIO()
    export_timeline(trace, trace.ranks, 10, file)
    return file.getvalue()


def _diff(trace: Trace) -> Any:
    side = summarise(trace)
    return diff_to_json(compare([side], [side], fail=[parse_gate("peak>+2%")]), ("a", "b"))


def _ranks(trace: Trace) -> Any:
    return compare_ranks(trace), read_curves(trace), find_stragglers(trace), job_notes(trace)


def _columns(trace: Trace) -> Any:
    for kind in TABLES:
        for column in kind.columns():
            trace.columns(kind, column.name)


def _history(trace: Trace) -> Any:
    history = History(trace)
    if history.ops:
        return history.alive(history.peak()), history.alive(0)
    return None


CHEAP: dict[str, Callable[[Trace], Any]] = {
    "steady step": lambda trace: trace.steady_step(),
    "report": lambda trace: json.dumps(report_to_json(build_report(trace), 20), allow_nan=False),
    "page": _page,
    "summary": lambda trace: json.dumps(summary_to_json(summarise(trace)), allow_nan=False),
    "diff": _diff,
    "history": _history,
    "columns": _columns,
    "timeline": _timeline,
    "stacks": export_stacks,
    "snapshot": exported,
    "ranks": _ranks,
    "post-mortem": examine,
    "allocator": lambda trace: allocator_to_json(build_allocator_report(trace.steady_step(), trace.manifest)),
    "static": lambda trace: static_to_json(build_static_report(trace.steady_step(), search_s=0.1)),
    "scrub": lambda trace: build_report(scrubbed(trace, names=["alice"])),
    "basis": basis_of,
    **{f"predict {plan.partition(']')[0][1:]}": _predicting(plan) for plan in _PLANS},
}
COSTLY: dict[str, Callable[[Trace], Any]] = {"html": export_html}
