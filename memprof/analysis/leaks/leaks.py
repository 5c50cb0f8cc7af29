"""The tensors that stay from step to step: where they are made, since when they are kept, and what holds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from memprof.analysis.leaks.after_window import grown_later, still_growing
from memprof.analysis.leaks.growth import (
    LEAST_LEAK_BYTES,
    LEAST_STEPS,
    Growth,
    Places,
    StepEnds,
    describe_growth,
    find_step_ends,
    first_third,
    growth_of_run,
    rhythm,
    steady_rise,
)
from memprof.analysis.leaks.held import Held
from memprof.analysis.leaks.leak import Leak, describe_cause, describe_rate, leaks_of_run
from memprof.analysis.report.notes import describe_steps
from memprof.analysis.report.sources import Sources, find_sources
from memprof.json_values import inline
from memprof.trace.files.coded import coded_column
from memprof.trace.files.spool import ARRAY, OBJECTS
from memprof.trace.schema import ELSEWHERE, NONE, Bools, Ints, Modules, Ops, Stacks, StepPeaks, Storages
from memprof.trace.store import Trace
from memprof.trace.usages import IS_LBFGS, read_optimizers
from memprof.units import format_bytes

#: Of these, what one step makes is set up: state of an optimizer, a gradient that is accumulated.
_SET_UP = {"optimizer_state", "parameter", "gradient", "buffer"}
#: What stays and may be growth is noticed from this share of the peak on.
_NOTICED = 0.005
#: Lines whose sum differs from a run's growth by less than this share of it are all of it.
_NEAR = 0.1


@dataclass(frozen=True)
class LeakReport:
    """Growth, and the tensors that make it up, those that grow fastest first."""

    growth: Growth = field(metadata=inline())
    leaks: tuple[Leak, ...]


def find_leaks(trace: Trace) -> LeakReport:
    """Finds the tensors that make live memory grow."""
    run = growth_of_run(trace.table(StepPeaks))
    if run is not None:
        leaks = leaks_of_run(trace, run) if run.bytes_per_step != 0 else []
        total = sum(leak.bytes_per_step for leak in leaks)
        if run.follows_inputs and not total:
            rate, why = (None, run.why_unknown) if run.bytes_per_step and run.why_unknown else (0, "")
            return LeakReport(replace(run, bytes_per_step=rate, why_unknown=why), ())
        growth = run.bytes_per_step or 0
        if growth and (run.follows_inputs or abs(total - growth) <= _NEAR * growth):
            run = replace(run, bytes_per_step=total, why_unknown="")  # the floor of the run is only near
        return LeakReport(run, tuple(sorted(leaks, key=lambda leak: -leak.bytes_per_step)))
    ends = find_step_ends(trace)
    count = 0 if ends is None else len(ends.steps)
    if ends is None or count < LEAST_STEPS:
        why = f"growth shows in {LEAST_STEPS} complete steps in a row; this recording has {count}."
        if count:
            why += f" Record more of them ({_again(trace, '--steps 12')})."
        else:
            why += (
                " A step ends when an optimizer updates. In a loop without one, `memprof record --light` counts each "
                "call of the model as a step; `memprof report` shows what it holds at its peak, by line."
            )
        return LeakReport(Growth(None, why_unknown=why), ())
    lines = _lines(trace, ends, find_sources(trace.table(Stacks)))
    found = sorted(lines, key=lambda leak: (-leak.bytes_per_step, -leak.kept_bytes))
    first, last = int(ends.steps[0]), int(ends.steps[-1])
    found = still_growing(trace, found, last)
    grown = [leak for leak in found if leak.every_steps]
    if found and not grown:
        return LeakReport(Growth(None, first, last, "storages", _why_undecided(trace, ends, found)), tuple(found))
    if not found and (later := grown_later(trace, last)):
        is_host = later[0].dtype.startswith(ARRAY) or later[0].dtype == OBJECTS
        again = "" if is_host else f" Record the whole run for the line and the rate ({_again(trace, '--light')})."
        why = (
            f"nothing from steps {first} to {last} stays, but later steps left {describe_rate(later[0])}, "
            f"{describe_cause(later[0])}.{again}"
        )
        return LeakReport(Growth(None, first, last, "storages", why), tuple(later))
    total = sum(leak.bytes_per_step for leak in grown)
    return LeakReport(Growth(total, first, last, "storages"), tuple(grown))


def describe_leaks(report: LeakReport) -> str:
    """Returns whether memory grows, with the line that makes most of what stays and what holds it."""
    verdict, leaks = describe_growth(report.growth), report.leaks
    if not report.growth.bytes_per_step or not leaks:
        return verdict
    is_all = leaks[0].bytes_per_step >= (1 - _NEAR) * report.growth.bytes_per_step
    most = "" if is_all else f"{format_bytes(leaks[0].bytes_per_step)} of it "
    return f"{verdict.removesuffix('.')}: {most}{describe_cause(leaks[0])}."


def growth_notice(trace: Trace) -> str:
    """Returns the sentence on growth, with its line and holder, where it is more than a list of numbers; else ""."""
    report, peaks = find_leaks(trace), trace.step_peaks()
    if report.growth.bytes_per_step is not None:
        return describe_leaks(report) if report.growth.bytes_per_step >= LEAST_LEAK_BYTES else ""
    sizes = list(peaks.values())
    if not report.growth.how:  # too few steps, the last of which may be the highest
        is_noticed = len(sizes) > 1 and sizes[-1] > sizes[0] and bool(describe_steps(peaks))
    else:
        kept = sum(leak.kept_bytes for leak in report.leaks)
        is_noticed = bool(describe_steps(peaks)) or kept > _NOTICED * max(sizes, default=0)
    return describe_growth(report.growth) if is_noticed else ""


def _again(trace: Trace, options: str) -> str:
    """Returns the command that records the job again."""
    from memprof.analysis.plans.predict import words_for_record  # most recordings need no other

    return f"`memprof record {options} {words_for_record(trace.manifest)}`"


def _why_undecided(trace: Trace, ends: StepEnds, found: list[Leak]) -> str:
    """Returns the sentence on what stays where the steps are too few to know whether more will."""
    kept, more = format_bytes(sum(leak.kept_bytes for leak in found)), max(12, 3 * len(ends.steps))
    return (
        f"{kept} of steps {ends.steps[0]} to {ends.steps[-1]} stay, {describe_cause(found[0])}; it may be a cache that "
        f"fills up. Record the whole run ({_again(trace, '--light')}), or {more} steps (`--steps {more}`)."
    )


def _lines(trace: Trace, ends: StepEnds, sources: Sources) -> Iterator[Leak]:
    """Yields the lines whose tensors become more, or larger, over the steps; those undecided with ``every_steps`` 0."""
    ops, storages, count = trace.table(Ops), ends.storages, len(ends.steps)
    born, gone = ends.born, ends.gone
    is_own = (born >= 0) & (born < count)
    is_elsewhere = coded_column(storages, "name").is_any(ELSEWHERE)  # the operator of then has not made it
    stays = is_own & (gone == count) & ((born < count - 1) | is_elsewhere)
    held = Held(trace, sources, storages, int(ends.steps[-1]))
    # The history of LBFGS fills up, until it has `history_size` updates.
    keeps_history = any(IS_LBFGS in one.words for one in read_optimizers(trace.manifest.optimizers))

    def by_line(rows: Bools) -> dict[str, list[int]]:
        groups: dict[str, list[int]] = {}
        for row in np.flatnonzero(rows).tolist():
            op = int(storages.created_op_id[row])
            line = None if is_elsewhere[row] else sources.of_stack(int(ops.stack_id[op]))
            place = f"{ops.name[op]} {storages.module_id[row]}" if line is None else line.place
            groups.setdefault(ELSEWHERE if is_elsewhere[row] else place, []).append(row)
        return groups

    rested = by_line(is_own & (gone < count) & (gone > born + 1))  # older than a step when they went
    for place, rows in by_line(stays).items():
        births = born[rows]
        if place == ELSEWHERE:  # what is made at the end of a step appears in the next one
            births = births - int(births.min() > 0)
        went = np.array(rested.get(place, []), dtype=np.int64)
        if len(went) and births.min() > born[went].max():
            continue  # a ring, or a list that is cleared: the oldest go
        youngest = count - 2 - int((gone[went] - born[went] - 1).max(initial=0))
        some, births = np.array(rows)[births <= youngest], births[births <= youngest]
        places = np.unique(births)
        every = rhythm(places.tolist(), youngest + 2)
        kinds = set(storages.category[some])
        is_history = keeps_history and kinds == {"optimizer_state"}
        if every == 0 or _is_replaced(ends, some) or (every is None and kinds <= _SET_UP and not is_history):
            continue
        holder = held.of(storages, some.tolist())
        if is_history or (holder is not None and holder.kind == "ring" and not holder.is_by_graph):
            every = None  # it fills up
        sizes = [int(storages.allocated_bytes[some[births == birth]].sum()) for birth in places]
        rate = 0 if every is None else int(np.median(sizes) if every == 1 else np.mean(sizes) / every)
        leak = _leak(trace, storages, some.tolist(), rate, sum(sizes), int(ends.steps[births.min()]), sources)
        leak = replace(leak, every_steps=every or 0)
        if leak.op:
            yield replace(leak, held_by=holder)
        else:  # of another thread
            holder, shape, dtype = held.of_elsewhere(sizes)
            yield replace(leak, held_by=holder, shape=shape, dtype=dtype)
    for rows in by_line(is_own & ~is_elsewhere & (gone > born)).values():
        if joined := _joined_anew(ends, rows, held):
            alive, every, rise = joined
            leak = _leak(trace, storages, [alive], rise, int(storages.allocated_bytes[alive]), None, sources)
            leak = replace(leak, every_steps=every)
            yield replace(leak, held_by=held.of(storages, [alive]))


def _is_replaced(ends: StepEnds, rows: Ints) -> bool:
    """Whether about as much goes of older storages as stays of some, in as many steps: a ring that was full."""
    sizes, third = ends.storages.allocated_bytes, first_third(len(ends.steps))
    went = (ends.born < 0) & (ends.gone >= third) & (ends.gone < len(ends.steps))
    late = rows[ends.born[rows] >= third - 1]
    many, added = len(set(ends.born[late].tolist())), int(sizes[late].sum())
    is_alike = len(set(ends.gone[went].tolist())) >= many >= 2 and 2 * int(sizes[went].sum()) >= added
    alive = ends.alive_bytes(is_older=True)
    return is_alike and 2 * int(alive[-1] - alive[third - 1]) < added


def _joined_anew(ends: StepEnds, rows: list[int], held: Held) -> tuple[int, int, int] | None:
    """Returns the latest of a line's tensors that are each computed from the one before and larger, such as a history.

    Returns:
        Its row, in every how many steps it is made anew (0 where undecided) and by how much it grows per step; None for
        a line that has no such tensors.
    """
    count, born, gone = len(ends.steps), ends.born, ends.gone
    latest = [max(own, key=lambda row: int(ends.storages.allocated_bytes[row])) for own in _by(born, rows)]
    sizes = ends.storages.allocated_bytes[latest]
    if len(latest) < 2 or gone[latest[-1]] < count or sizes[-1] <= sizes[-2]:
        return None  # before origins are followed, which takes long
    chain = latest[-1:]
    for row in reversed(latest[:-1]):
        if row not in held.origins_of(chain[0]):
            break
        chain.insert(0, row)
    if len(chain) < 2 or not (rise := steady_rise(sizes[-len(chain) :])):
        return None
    every = rhythm(born[chain].tolist(), count + 1)
    return None if every == 0 else (chain[-1], every or 0, rise // every if every else 0)


def _by(places: Places, rows: list[int]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for row in sorted(rows, key=lambda row: int(places[row])):
        groups.setdefault(int(places[row]), []).append(row)
    return list(groups.values())


def _leak(
    trace: Trace,
    storages: Storages,
    rows: list[int],
    bytes_per_step: int,
    kept_bytes: int,
    since_step: int | None,
    sources: Sources,
) -> Leak:
    """Returns the leak of some storages of one line, described by the largest, without its holder.

    Args:
        trace: The recording.
        storages: Its storages.
        rows: Those that stay.
        bytes_per_step: Growth per step.
        kept_bytes: Their bytes at the end of the observation.
        since_step: Step in which the oldest was made; None if unknown.
        sources: Lines of the recording.
    """
    ops, largest = trace.table(Ops), max(rows, key=lambda row: int(storages.allocated_bytes[row]))
    op = int(storages.created_op_id[largest])
    is_elsewhere = storages.name[largest] == ELSEWHERE  # the operator of then has not made it
    source = None if is_elsewhere else sources.of_stack(int(ops.stack_id[op]))
    return Leak(
        bytes_per_step=bytes_per_step,
        kept_bytes=kept_bytes,
        tensors=len(rows),
        since_step=since_step,
        category=str(storages.category[largest]),
        shape=str(storages.shape[largest]),
        dtype=str(storages.dtype[largest]),
        op="" if is_elsewhere else str(ops.name[op]),
        module=_title(trace.table(Modules), int(storages.module_id[largest])),
        line="" if source is None else source.place,
        every_steps=1,
        held_by=None,
    )


def _title(modules: Modules, module: int) -> str:
    """Returns a module's name, or the type of the root; "" for none."""
    return "" if module == NONE else str(modules.name[module]) or str(modules.type[module])
