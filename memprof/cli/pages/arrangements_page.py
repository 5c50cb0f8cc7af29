"""The page of `memprof suggest --devices`: the fastest arrangements, and the stages of a pipeline."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from memprof.analysis.plans.arrangements import Arrangements, Balance, Proposal
from memprof.cli.page import Page, cell, make_table
from memprof.planners.arrangement.pipeline import StagePeak
from memprof.planners.arrangement.search import Arranged
from memprof.units import format_bytes, format_percent, format_us, printable

#: Width of the longest bar of a stage's peak, in characters.
_BAR = 24


def show_arrangements(
    found: Arrangements, warnings: Sequence[str], device: str, trace: str, written: Path | None
) -> None:
    """Prints the arrangements.

    Args:
        found: What was found.
        warnings: Caveats on the recorded step, sentences.
        device: Name of the device, "" where unknown.
        trace: Name of the recording.
        written: Where the plan was written, or None.
    """
    page = Page.for_stdout()
    for sentence in warnings:
        page.add(Text(f"warning: {printable(sentence)}", style="yellow"))
    page.add(Text(_verdict(found, device)))
    if found.proposals:
        samples = f"{found.question.samples:,} samples an update"
        page.add_section("Arrangements", _table(found), f"the fastest of each kind; worst rank's peak; {samples}")
        _add_calls(page, found)
    if found.balance is not None:
        page.add_section("Peak of each stage", _stages(found.balance, found.question.costs.names), _split_words(found))
    page.add(Text(""))
    for sentence in found.assumptions:
        page.add(cell(f"assumed: {sentence}", "dim"))
    page.add(Text(f"next: {_next(found, trace, written)}", style="dim"))
    page.write()


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
            f"{_details(nearest)}, still holds {format_bytes(nearest.peak_bytes)} on its worst rank{stopped}."
        )
    one = best.arranged
    return (
        f"{where}: {one.arrangement.describe()} is fastest, {format_us(best.step_us)} a step and "
        f"{best.samples_per_second:,.4g} samples/s; its worst rank holds {format_bytes(best.peak_bytes)} of {budget} "
        f"({_source(best)}){stopped}."
    )


def _details(one: Arranged) -> str:
    ways = one.arrangement
    return f"{ways.micro_batches} x {ways.samples} samples, {_saved(one) or 'nothing recomputed'}"


def _saved(one: Arranged) -> str:
    """Returns what is recomputed and offloaded; "" for neither."""
    ways = one.arrangement
    parts = []
    if ways.checkpointed != "none":
        parts.append(f"checkpoint {ways.checkpointed}")
    if ways.offloaded != "nothing":
        parts.append(f"offload {ways.offloaded}")
    return ", ".join(parts)


def _source(one: Proposal) -> str:
    return "modelled" if one.plan is None else "replayed"


def _table(found: Arrangements) -> Table:
    table = make_table(
        "arrangement",
        ">micro-batches x samples",
        "schedule",
        "recompute, offload",
        ">peak",
        ">step",
        ">samples/s",
        ">comm",
        ">bubble",
        "figures",
    )
    for each in found.proposals:
        one = each.arranged
        ways, times = one.arrangement, one.times
        fits = each.peak_bytes <= found.question.budget_bytes
        table.add_row(
            ways.describe(),
            f"{ways.micro_batches} x {ways.samples}",
            ways.schedule,
            _saved(one),
            Text(format_bytes(each.peak_bytes), style="green" if fits else "red"),
            format_us(each.step_us),
            f"{each.samples_per_second:,.4g}",
            format_percent(times.communication_us / times.step_us),
            format_percent(times.bubble_us / times.step_us) if ways.pipeline > 1 else "",
            _source(each),
        )
    return table


def _add_calls(page: Page, found: Arrangements) -> None:
    """Adds what carries out the fastest arrangement, and what memprof applies instead where it is not that one."""
    best, applied = found.best, found.applicable
    if best is None:
        return
    if best.plan is None:
        page.add(Text(""))
        page.add(Text(f"memprof does not apply {best.arranged.arrangement.describe()}: {best.why_not}. In torch:"))
        for call in best.calls:
            page.add(cell(f"  {call}"))
    if applied is not None and applied is not best:
        one = applied.arranged
        slower = applied.step_us / best.step_us - 1
        page.add(
            Text(
                f"memprof applies {one.arrangement.describe()}, {_details(one)}: {format_percent(slower)} slower, "
                f"{format_bytes(applied.peak_bytes)} on its worst rank (replayed)."
            )
        )


def _stages(balance: Balance, names: Sequence[str]) -> Table:
    table = make_table(
        ">stage",
        "layers",
        ">micro-batches held",
        ">state",
        ">peak",
        ">equal layers",
        ">levelled",
        "levelled layers",
        "peak",
    )
    most = max(each.peak_bytes for each in (balance.chosen, balance.equal, balance.levelled))
    for row, stage in enumerate(balance.chosen.stages):
        equal, levelled = balance.equal.stages[row], balance.levelled.stages[row]
        table.add_row(
            str(row),
            _layers(stage, names),
            str(stage.held),
            format_bytes(stage.state_bytes),
            format_bytes(stage.peak_bytes),
            format_bytes(equal.peak_bytes),
            format_bytes(levelled.peak_bytes),
            _layers(levelled, names),
            Text("█" * max(1, round(_BAR * stage.peak_bytes / most)), style="cyan"),
        )
    return table


def _layers(stage: StagePeak, names: Sequence[str]) -> str:
    """Names the layers of a stage: ``0 to 7``, and whether it has what runs before or after all layers."""
    first, end = stage.units[0]
    low, high = max(first, 1), min(end, len(names) - 1)
    words = f"{low - 1} to {high - 2}" if high - low > 1 else f"{low - 1}"
    return ("before, " if first == 0 else "") + words + (", after" if end == len(names) else "")


def _split_words(found: Arrangements) -> str:
    assert found.balance is not None  # the caller shows it
    chosen, equal, levelled = found.balance.chosen, found.balance.equal, found.balance.levelled
    return (
        f"{chosen.arrangement.describe()}, {chosen.arrangement.schedule}, {_details(chosen)}; worst "
        f"{format_bytes(chosen.peak_bytes)} at {format_us(chosen.times.step_us)}; with equal layers "
        f"{format_bytes(equal.peak_bytes)} at {format_us(equal.times.step_us)}; levelled "
        f"{format_bytes(levelled.peak_bytes)} at {format_us(levelled.times.step_us)}"
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
