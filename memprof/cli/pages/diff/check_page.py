"""`memprof diff` with one recording: whether it is within a budget and other bounds, without a base."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from memprof.cli.options.shared_options import chosen_gates
from memprof.errors import UsageError
from memprof.harmless import notify

if TYPE_CHECKING:
    from memprof.analysis.diff.budget import BudgetVerdict
    from memprof.analysis.diff.gates import Verdict
    from memprof.analysis.diff.summary_model import Summary


#: Version of the JSON's keys.
CHECK_SCHEMA = 1


def check(
    trace: str,
    budget: str | None,
    machine: str | None,
    fail_on: tuple[str, ...],
    warn_on: tuple[str, ...],
    *,
    is_json: bool,
) -> int:
    """Prints whether a recording is within its bounds, and returns the exit code: 4 if it is not, 3 if undecided.

    Args:
        trace: The recording, or the JSON of a summary.
        budget: Maximum peak; None for that of the plan that the recording ran under.
        machine: Device whose budget it is; None for none.
        fail_on: Gates that fail; those of the project if none is given.
        warn_on: Gates that warn.
        is_json: Print JSON.

    Raises:
        UsageError: A gate limits growth, which needs a base, or no limit is given.
    """
    fail, warn = chosen_gates(fail_on, warn_on)
    from memprof.analysis.allocator.uncertainty import describe_torch, room_of
    from memprof.analysis.diff.budget import BudgetVerdict, judge_planned
    from memprof.analysis.diff.comparison import is_summary, open_side
    from memprof.analysis.diff.gates import measure, parse_gate, require_phases
    from memprof.analysis.diff.summary_model import PEAK
    from memprof.errors import GateFailedError, InconclusiveError
    from memprof.machines.budget import no_room, parse_budget
    from memprof.machines.catalogue import find_machine
    from memprof.trace.store import Trace
    from memprof.units import format_bytes

    if fail_on or warn_on:
        grows = next((gate for gate in (*fail, *warn) if gate.needs_base), None)
        if grows is not None:
            raise UsageError(
                f"the gate {grows.text!r} limits growth, which needs a base: memprof diff base.memprof {trace}"
            )
    skipped = [gate.text for gate in (*fail, *warn) if gate.needs_base]  # of the project, for two recordings
    fail, warn = ([gate for gate in gates if not gate.needs_base] for gates in (fail, warn))
    summary, planned = open_side(trace), None
    if budget is not None or machine is not None:
        device = find_machine(machine) if machine else None
        room = no_room if is_summary(trace) else room_of(Trace.open(trace))
        given = parse_budget(budget, summary.peak.bytes, device, room)
        within: BudgetVerdict | None = BudgetVerdict(given, summary.peak.bytes, unknown=summary.lower_bound)
        own = parse_gate(f"peak>{given}")
        fail.insert(0, own)
    else:
        own = None
        within = planned = None if is_summary(trace) else judge_planned(Trace.open(trace))
    if not fail and not warn and planned is None:
        raise UsageError(
            f"nothing to compare {trace} with: name a second recording, or a bound such as --budget 40GiB, --device "
            "rtx3090 or --fail-on 'peak>40GiB'."
        )
    if skipped:
        notify(f"without a base, these gates of the project are skipped: {', '.join(skipped)}")
    require_phases((*fail, *warn), (name for name in summary.spots if name != PEAK))
    verdicts = [
        (level, gate.judge(float("nan"), measure(gate, summary), least_head=summary.lower_bound))
        for level, gates in (("fail", fail), ("warn", warn))
        for gate in gates
    ]
    is_failed = any(level == "fail" and verdict.is_failed for level, verdict in verdicts)
    is_failed |= planned is not None and planned.fits is False
    is_undecided = any(level == "fail" and verdict.is_undecided for level, verdict in verdicts)
    known = InconclusiveError.exit_code if is_undecided else 0 if planned is None else planned.exit_code
    status = GateFailedError.exit_code if is_failed else known
    if is_json:
        print(json.dumps(_json(summary, within, verdicts, is_failed=is_failed), indent=2))
        return status
    from memprof.units import printable

    for line in _lines(summary, planned, verdicts, {own.text: f"peak>{format_bytes(given)}"} if own else {}):
        print(printable(line))
    if not is_summary(trace) and (torch := describe_torch(Trace.open(trace))):
        print(printable(f"the dry run {torch}"))
    if planned is not None and planned.fits is False:
        for command, reason in _another_plan(trace, planned):
            print(printable(f"next: {command}  {reason}"))
    elif is_failed and not is_summary(trace):  # only diff reads a summary
        if all(verdict.gate.name == "growth" for _, verdict in verdicts if verdict.is_failed):
            command = f"report {shlex.quote(trace)} --leaks  which tensors stay, and what holds them"
        else:
            command = f"suggest {shlex.quote(trace)} {_limit(budget, machine)}  what makes it fit"
        print(printable(f"next: memprof {command}"))
    return status


def _json(
    summary: Summary, within: BudgetVerdict | None, verdicts: list[tuple[str, Verdict]], *, is_failed: bool
) -> dict[str, Any]:
    from memprof.analysis.diff.budget import NO_BUDGET

    return {
        "schema": CHECK_SCHEMA,
        "is_failed": is_failed,
        "peak_allocated_bytes": summary.peak.bytes,
        "peak_in": summary.peak.place,
        **(NO_BUDGET if within is None else within.to_json()),
        "gates": [
            {
                "gate": verdict.gate.text,
                "level": level,
                "is_failed": verdict.is_failed,
                "is_known": verdict.is_known,
            }
            for level, verdict in verdicts
        ],
    }


def _lines(
    summary: Summary, planned: BudgetVerdict | None, verdicts: list[tuple[str, Verdict]], bounds: dict[str, str]
) -> Iterator[str]:
    """Yields the lines of the page; ``bounds`` has other texts for gates, by their own."""
    from memprof.analysis.report.notes import describe_peaks
    from memprof.units import format_bytes

    place = f"{summary.peak.place} ({summary.peak.op})" + (f", {summary.peak.line}" if summary.peak.line else "")
    steps = describe_peaks(summary.step_peaks)
    yield f"peak {format_bytes(summary.peak.bytes)} in {place}{steps and f'; recorded steps: {steps}'}"
    if planned is not None:
        yield planned.describe()
    for level, verdict in verdicts:
        word = {(True, "fail"): "FAILED", (True, "warn"): "warning"}.get((verdict.is_failed, level), "passed")
        bound = bounds.get(verdict.gate.text, verdict.gate.text)
        limit = bound.partition(">")[2]
        is_size = verdict.is_known and limit[:1].isdigit() and "&" not in limit
        compared = f" {'>' if verdict.is_failed else '<='} {limit}" if is_size else f", gate {bound}"
        yield f"{word if verdict.is_known else 'unknown'}: {verdict.describe()}{compared}"


def _limit(budget: str | None, machine: str | None) -> str:
    """Returns the options with which `memprof suggest` searches below the limit that was exceeded."""
    if budget is None and machine is not None:
        return f"--device {shlex.quote(machine)}"
    return f"--budget {shlex.quote(budget or '80%')}"


def _another_plan(path: str, found: BudgetVerdict) -> list[tuple[str, str]]:
    """Returns the commands that find another plan for a job that exceeded the budget of its own plan."""
    from memprof.analysis.plans.another_plan import PlannedJob, commands_over_budget
    from memprof.analysis.plans.predict import words_for_record
    from memprof.policies.plan.plan_tables import plan_from_tables
    from memprof.trace.store import Trace

    manifest = Trace.open(path).manifest
    job = PlannedJob(plan_from_tables(manifest.plan or {}), words=words_for_record(manifest))
    return commands_over_budget(job, found.measured_bytes or 0)
