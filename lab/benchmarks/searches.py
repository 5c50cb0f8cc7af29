"""Planners and searches: their overheads at each budget, the optimal time, and how long they take."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from lab.benchmarks.recording import ONE_THREAD, SAMPLES, peak_bytes, run, sample
from lab.benchmarks.section import Bar, Section
from memprof.analysis.plans.compare_planners import SHARES, Point, compare_planners
from memprof.planners.base import planner_types
from memprof.planners.find import find_plan
from memprof.planners.published.swap import SwapOut
from memprof.planners.search.explore import explore
from memprof.planners.search.request import SearchRequest
from memprof.replay.live import live_bytes
from memprof.trace.step import Step
from memprof.trace.store import Trace
from tests.planners.graphs import random_graph, residual, unet, uneven_chain

MODELS = ("gpt", "resnet", "lstm")
#: Bandwidth to host memory that the swap planner is told, in bytes a microsecond: PCIe 4.0 x16.
LINK = 24e3
#: Most of the exact solution's time that auto may take on top, in per cent, and the seconds that each may search.
GAP_BAR = 1.0
_EXACT_S, _AUTO_S = 60.0, 20.0
#: Highest time of a search for a 24-layer GPT, in seconds.
SEARCH_BAR_S = 10.0


def planners(folder: Path, *, quick: bool) -> Section:
    """Asks every planner at every budget, and holds auto to the best of the others."""
    rows = []
    worse = []
    for model in MODELS[: 1 if quick else None]:
        step = Trace.open(SAMPLES / model / "run.memprof").steady_step()
        shares = SHARES[::3] if quick else SHARES
        limit_s = 3.0 if quick else 10.0
        # Swapping needs a second memory; auto is asked for what the device alone can do.
        alone = [kind for kind in planner_types() if kind is not SwapOut]
        points = compare_planners(step, shares, time_limit_s=limit_s, planners=alone)
        moved = compare_planners(step, shares, time_limit_s=limit_s, planners=[SwapOut], link_bytes_per_us=LINK)
        for name in dict.fromkeys(point.planner for point in (*points, *moved)):
            own = {point.share: point for point in (*points, *moved) if point.planner == name}
            rows.append((f"{model}: {name}", *(_entry(own[share]) for share in shares), f"{_longest(own):.1f}"))
        for share in shares:
            at = {point.planner: point for point in points if point.share == share}
            best = min((p.overhead for p in at.values() if not math.isnan(p.overhead)), default=math.nan)
            if not math.isnan(best) and not at["auto"].overhead <= best + 1e-9:
                worse.append(f"{model} at {share:.0%}")
            bound = max(point.bound for point in at.values())
            rows += [] if math.isnan(best) else [_bound_row(model, share, best, bound, shares)]
    over = f": {', '.join(worse)}" if worse else ""
    columns = ("model and planner", *(f"{share:.0%}" for share in (SHARES[::3] if quick else SHARES)), "longest, s")
    merged = _merged(rows)
    return Section(
        "Planners: overhead over the step time",
        "Per cent of the recorded step, by budget as a share of the recorded peak; * proved optimal, x proved "
        "infeasible, - nothing found; ten seconds a search. 'best single' is the best of checkmate, chain, dtr, "
        "knapsack, selective, sqrt and bptt.",
        columns,
        merged,
        Bar("auto is never worse than a single planner", f"worse {len(worse)} times{over}", passed=not worse),
        brief=every_second(columns, with_best_single(merged)),
    )


def with_best_single(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Returns the rows with those of single planners joined into one for each model, of their least overheads."""
    single: dict[str, list[tuple[str, ...]]] = {}
    for name, *cells in rows:
        model, planner = name.split(": ")
        if planner not in ("auto", "best above bound", SwapOut.name):
            single.setdefault(model, []).append(tuple(cells))
    shown = []
    for name, *cells in rows:
        model, planner = name.split(": ")
        if planner == "auto":
            best = [_least([one[place] for one in single[model]]) for place in range(len(cells) - 1)]
            shown.append((f"{model}: best single", *best, max(one[-1] for one in single[model])))
            shown.append((name, *cells))
    return shown


def every_second(
    columns: Sequence[str], rows: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Returns a table with every second budget."""
    return (columns[0], *columns[1:-1:2], columns[-1]), [(row[0], *row[1:-1:2], row[-1]) for row in rows]


def _least(cells: Sequence[str]) -> str:
    found = [cell for cell in cells if cell.strip("x-")]
    return min(found, key=lambda cell: float(cell.rstrip("*")), default="x" if "x" in cells else "-")


def _entry(point: Point) -> str:
    if math.isnan(point.overhead):
        return "x" if point.status == "infeasible" else "-"
    assert point.peak_bytes <= point.budget_bytes
    return f"{100 * point.overhead:.2f}" + ("*" if point.status == "optimal" else "")


def _longest(own: dict[float, Point]) -> float:
    return max(point.took_s for point in own.values())


def _bound_row(model: str, share: float, best: float, bound: float, shares: tuple[float, ...]) -> tuple[str, ...]:
    cells = [f"{100 * (best - bound):.2f}" if one == share else "" for one in shares]
    return (f"{model}: best above bound", *cells, "")


def _merged(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Joins rows of one name, each of which fills some cells."""
    joined: dict[str, list[str]] = {}
    for name, *cells in rows:
        known = joined.setdefault(name, [""] * len(cells))
        joined[name] = [new or old for old, new in zip(known, cells, strict=True)]
    return [(name, *cells) for name, cells in joined.items()]


def optimality(folder: Path, *, quick: bool) -> Section:
    """Asks checkmate for the least time and auto for its own, on graphs of at most 60 operators."""
    rows, every = [], []
    for name, steps in _families(quick=quick).items():
        excesses, asked, unproved = [], 0, 0
        for step in steps:
            peak = peak_bytes(step)
            for share in SHARES[::3] if quick else SHARES:
                asked += 1
                budget = int(share * peak)
                exact = find_plan(step, budget, planner="checkmate", time_limit_s=5.0 if quick else _EXACT_S)
                if exact.status == "infeasible":
                    continue
                found = find_plan(step, budget, time_limit_s=_AUTO_S)
                if exact.status != "optimal":
                    unproved += 1
                    continue
                excesses.append(100 * (found.schedule_time_us / exact.schedule_time_us - 1))
        every += excesses
        largest = max(len(step.ops) for step in steps)
        gaps = [f"{statistics.fmean(excesses):.2f} %", f"{max(excesses):.2f} %"] if excesses else ["", ""]
        number = f"{len(steps)}, up to {largest} operators"
        rows.append((name, number, f"{len(excesses)} of {asked}", f"{unproved}", *gaps))
    worst = max(every, default=float("nan"))
    return Section(
        "Optimality gap of auto",
        "Budgets of 90 to 30 % of the peak, against Checkmate's integer program on the same graph, solved with HiGHS "
        f"in {_EXACT_S:.0f} s at most; a case counts where the optimum was proved. The rest are infeasible.",
        ("graphs", "number", "proved", "not proved in time", "mean excess of time", "largest"),
        rows,
        Bar(
            f"auto within {GAP_BAR:.0f} % of the proved optimum",
            f"{worst:.2f} % at most, {len(every)} cases",
            passed=worst <= GAP_BAR,
        ),
    )


def _families(*, quick: bool) -> dict[str, list[Step]]:
    seeds = range(1 if quick else 3)
    return {
        "uneven chains": [uneven_chain(layers, seed) for layers, seed in zip((10, 20, 30), seeds, strict=False)],
        "U-Nets": [unet(depth) for depth in ((2,) if quick else (2, 3, 4))],
        "residual networks": [residual(blocks) for blocks in ((2,) if quick else (2, 3, 4))],
        "random graphs": [random_graph(count, seed) for count, seed in zip((10, 20, 30), seeds, strict=False)],
    }


def search_time(folder: Path, *, quick: bool) -> Section:
    """Searches at half of the peak: GPTs of more and more layers, and convolutional graphs built from arrays."""
    rows, of_24 = [], 0.0
    for layers in (4, 24) if quick else (4, 24, 48, 440):
        path = folder / f"gpt{layers}.memprof"
        arguments = ("--layers", str(layers), "--batch-size", "8", "--length", "64", "--width", "32", "--steps", "8")
        run(sample("gpt", *arguments).recorded(path, steps=1), folder, **ONE_THREAD)
        step = Trace.open(path).steady_step()
        budget = _halfway(step)
        started = time.monotonic()
        answer = explore(step, SearchRequest(budget, time_limit_s=600.0))
        took = time.monotonic() - started
        of_24 = took if layers == 24 else of_24
        best = answer.best
        over = "" if best is None else f"{100 * (best.step_time_us / step.duration_us - 1):+.1f} %"
        name = f"suggest, GPT of {layers} layers"
        rows.append((name, f"{len(step.ops):,}", f"{answer.tried}", f"{took:.1f}", over))
    for blocks in (28, 70) if quick else (28, 70, 700, 7000):
        step = residual(blocks)
        started = time.monotonic()
        found = find_plan(step, _halfway(step), time_limit_s=60.0)
        took = time.monotonic() - started
        overhead = 100 * (found.schedule_time_us / step.duration_us - 1) if found.runs is not None else float("nan")
        rows.append((f"auto, {blocks} residual blocks", f"{len(step.ops):,}", "", f"{took:.1f}", f"{overhead:+.1f} %"))
    return Section(
        "Search time",
        "A budget halfway between the step's first bytes and its peak. `suggest` replays whole plans; `auto` plans "
        "single operators, for 60 s at most.",
        ("search", "operators", "plans replayed", "seconds", "overhead over the step time"),
        rows,
        Bar(f"24-layer GPT within {SEARCH_BAR_S:.0f} s", f"{of_24:.1f} s", passed=of_24 <= SEARCH_BAR_S),
    )


def _halfway(step: Step) -> int:
    """Returns a budget that leaves half of what the step needs beyond what it begins with."""
    during = live_bytes(step).during
    return int(during[0] + during.max()) // 2
