"""`memprof check`: whether a recording is within a budget and other bounds, without a baseline."""

from __future__ import annotations

import json

import click

from memprof.cli.gate_options import chosen_gates, gate_options
from memprof.errors import UsageError


@click.command(
    epilog="""\b
Examples:
  memprof check run.memprof --budget 40GiB
  memprof check run.memprof --fail-on 'phase:backward>24GiB' --warn-on 'step_time>250ms'"""
)
@click.argument("trace", type=click.Path(), metavar="TRACE")
@click.option("--budget", metavar="SIZE", help="Most bytes allocated at once: 40GiB.")
@click.option("--machine", metavar="NAME", help="Budget of this device, such as rtx3090 or a100-80g.")
@gate_options
@click.option("--json", "is_json", is_flag=True, help="Print everything as JSON.")
def check(
    trace: str,
    budget: str | None,
    machine: str | None,
    fail_on: tuple[str, ...],
    warn_on: tuple[str, ...],
    is_json: bool,
) -> int:
    """Check a recording against a budget, without anything to compare it with.

    TRACE is a recording or the JSON of memprof summary. The exit code is 4 where it is above. Gates that bound growth
    need a base: memprof diff.
    """
    fail, warn = chosen_gates(fail_on, warn_on)
    from memprof.analysis.diff import measure, open_side
    from memprof.analysis.gates import parse_gate
    from memprof.errors import GateFailedError
    from memprof.machines.budget import parse_budget
    from memprof.machines.catalogue import find_machine

    if fail_on or warn_on:
        grows = next((gate for gate in (*fail, *warn) if gate.needs_base), None)
        if grows is not None:
            raise UsageError(
                f"The gate {grows.text!r} bounds growth, and there is nothing to compare with: memprof diff."
            )
    # Those of the project may be for diffs.
    fail, warn = ([gate for gate in gates if not gate.needs_base] for gates in (fail, warn))
    summary = open_side(trace)
    if budget is not None or machine is not None:
        device = find_machine(machine) if machine else None
        fail.insert(0, parse_gate(f"peak>{parse_budget(budget, summary.peak.bytes, device)}"))
    if not fail and not warn:
        raise UsageError("There is nothing to check: give --budget 40GiB, --machine rtx3090 or --fail-on 'peak>40GiB'.")
    verdicts = [
        (level, gate.judge(float("nan"), measure(gate, summary)))
        for level, gates in (("fail", fail), ("warn", warn))
        for gate in gates
    ]
    is_failed = any(level == "fail" and verdict.is_failed for level, verdict in verdicts)
    if is_json:
        record = {
            "is_failed": is_failed,
            "peak_allocated_bytes": summary.peak.bytes,
            "peak_in": summary.peak.place,
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
        print(json.dumps(record, indent=2))
        return GateFailedError.exit_code if is_failed else 0
    from memprof.cli.page import printable
    from memprof.units import format_bytes

    place = f"{summary.peak.place} ({summary.peak.op})" + (f", {summary.peak.line}" if summary.peak.line else "")
    print(printable(f"peak {format_bytes(summary.peak.bytes)} in {place}"))
    for level, verdict in verdicts:
        word = {(True, "fail"): "FAILED", (True, "warn"): "warning"}.get((verdict.is_failed, level), "passed")
        print(printable(f"{word if verdict.is_known else 'unknown'}: {verdict.gate.text}: {verdict.describe()}"))
    if is_failed:
        print(printable(f"next: memprof suggest {trace} --budget {budget or machine or '80%'}  what makes it fit"))
    return GateFailedError.exit_code if is_failed else 0
