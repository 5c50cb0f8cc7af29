"""The page of `memprof suggest --devices`: the fastest arrangements, and the stages of a pipeline."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from memprof.analysis.arrangement.arrangement_tables import describe_details, describe_splits, proposals, stages
from memprof.analysis.arrangement.arrangements import Arrangements
from memprof.cli.page import Page
from memprof.units import format_bytes, format_percent, format_us


def fill_arrangements(
    page: Page, found: Arrangements, warnings: Sequence[str], device: str, trace: str, written: Path | None
) -> None:
    """Adds the arrangements to a page.

    Args:
        page: The page.
        found: What was found.
        warnings: Caveats on the recorded step, sentences.
        device: Name of the device, "" where unknown.
        trace: Name of the recording.
        written: Where the plan was written, or None.
    """
    page.warn(*warnings)
    page.say(_verdict(found, device))
    if found.proposals:
        samples = f"{found.question.samples:,} samples an update"
        page.add_section("Arrangements", proposals(found), f"the fastest of each kind; worst rank's peak; {samples}")
        _add_calls(page, found)
    if found.balance is not None:
        page.add_section(
            "Peak of each stage", stages(found.balance, found.question.costs.names), describe_splits(found.balance)
        )
    page.add("")
    for sentence in found.assumptions:
        page.say(f"assumed: {sentence}", "dim")
    page.add_next((_next(found, trace, written), ""))


def _verdict(found: Arrangements, device: str) -> str:
    question = found.question
    where = f"{question.cluster.devices} devices" + (f" ({device})" if device else "")
    budget = format_bytes(question.budget_bytes)
    stopped = " (search stopped at its time limit)" if found.search.was_stopped else ""
    best = found.best
    if best is None:
        nearest = found.search.nearest
        if nearest is None:
            return f"No arrangement over {where} is possible with {question.samples:,} samples an update{stopped}."
        return (
            f"No arrangement over {where} fits {budget}: {nearest.arrangement.describe()}, "
            f"{describe_details(nearest)}, still holds {format_bytes(nearest.peak_bytes)} on its worst rank{stopped}."
        )
    one = best.arranged
    return (
        f"{where}: {one.arrangement.describe()} is fastest, {format_us(best.step_us)} a step and "
        f"{best.samples_per_second:,.4g} samples/s; its worst rank holds {format_bytes(best.peak_bytes)} of {budget} "
        f"({best.source}){stopped}."
    )


def _add_calls(page: Page, found: Arrangements) -> None:
    """Adds what carries out the fastest arrangement, and what memprof applies instead where it is not that one."""
    best, applied = found.best, found.applicable
    if best is None:
        return
    if best.plan is None:
        page.add("")
        page.say(f"memprof does not apply {best.arranged.arrangement.describe()}: {best.why_not}. In torch:")
        for call in best.calls:
            page.say(f"  {call}")
    if applied is not None and applied is not best:
        one = applied.arranged
        slower = applied.step_us / best.step_us - 1
        page.say(
            f"memprof applies {one.arrangement.describe()}, {describe_details(one)}: {format_percent(slower)} slower, "
            f"{format_bytes(applied.peak_bytes)} on its worst rank (replayed)."
        )


def _next(found: Arrangements, trace: str, written: Path | None) -> str:
    applied = found.applicable
    if written is not None and applied is not None:
        return f"memprof record --plan {shlex.quote(str(written))} train.py"
    if found.best is None:
        return "more devices, a smaller --global-batch, or a recording with a smaller batch"
    if applied is not None:
        return f"memprof suggest {shlex.quote(trace)} --devices {found.question.cluster.devices} ... --write plan.toml"
    return "no arrangement shown is one that memprof applies itself; the torch calls above carry it out"
