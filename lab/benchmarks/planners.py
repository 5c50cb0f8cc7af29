"""What overhead does each planner have at each budget, on schedules of single operators?"""

from __future__ import annotations

import math
from pathlib import Path

from lab.benchmarks.recording import SAMPLES
from lab.benchmarks.section import Section, verdict
from memprof.analysis.plans.compare_planners import SHARES, Point, compare_planners
from memprof.planners.base import planner_types
from memprof.planners.published.swap import SwapOut
from memprof.trace.store import Trace

MODELS = ("gpt", "resnet", "lstm")
#: Bandwidth to host memory that the swap planner is told, in bytes a microsecond: PCIe 4.0 x16.
LINK = 24e3


def measure(folder: Path, *, quick: bool) -> Section:
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
    rows = [row for row in rows if row is not None]
    over = f"; auto is slower in {', '.join(worse)}" if worse else ""
    return Section(
        "Planners: overhead over the step time",
        "Per cent of the recorded step, by budget as a share of the recorded peak; * proved optimal, x proved "
        "infeasible, - nothing found. Replayed peaks are within the budget in every case. The rows 'best above bound' "
        "are the distance of the best from the proved lower bound, in percentage points. At most ten seconds per "
        "search.",
        ("model and planner", *(f"{share:.0%}" for share in (SHARES[::3] if quick else SHARES)), "longest search, s"),
        tuple(_merged(rows)),
        verdict(f"auto is never worse than a single planner{over}", passed=not worse),
    )


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
